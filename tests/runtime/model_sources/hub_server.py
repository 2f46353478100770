"""A hub of our own: as much of Hugging Face's as huggingface_hub asks for a model and its files, and its failures.

Repositories are dicts of path to content; a file of `LARGE_BYTES` or more is in Git LFS, known by its SHA-256.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1000
TOKEN = "hf_the_right_one"
COMMIT = "c0ffee" * 6 + "c0ff"
_PIECE_BYTES = 1 << 16


@dataclass
class Repository:
    """`readers`: everyone, whoever has the token, or nobody yet (gated, and this account was not let in)."""

    files: dict[str, bytes]
    readers: str = "everyone"
    revisions: tuple[str, ...] = ("main", COMMIT)


@dataclass
class Faults:
    """What goes wrong, by path of a file. Each may be changed while the hub runs."""

    damaged: dict[str, int] = field(default_factory=dict)
    """So many answers have a byte flipped."""
    cut: dict[str, int] = field(default_factory=dict)
    """Each answer ends after so many bytes, and the connection with it."""
    silent_after: dict[str, int] = field(default_factory=dict)
    """Nothing comes from this byte of the file on, until `released`."""
    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when an answer has fallen silent."""
    bytes_per_second: float | None = None
    """Of each answer's body; None: as fast as it goes."""
    knows_ranges: bool = True
    knows_sizes: bool = True
    status: int | None = None
    """Of every answer."""
    page: bytes | None = None
    """What every answer is, as of a proxy that wants a password."""


@dataclass(frozen=True)
class Asked:
    """A request for a file: `offset` 0 where it is for the whole."""

    path: str
    offset: int


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.asked: list[Asked] = []
        self.url = ""

    def offsets(self, path: str) -> list[int]:
        return [each.offset for each in self.asked if each.path == path]


@contextmanager
def running_hub(address: str = "127.0.0.1", port: int = 0) -> Iterator[Hub]:
    """`port` 0: any that is free."""
    hub = Hub()

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    hub.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.faults.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.of.faults.page is not None:
            self._send(200, self.of.faults.page, {"Content-Type": "text/html"})
            return
        try:
            if self.of.faults.status is not None:
                raise _Refusal(self.of.faults.status)
            if parts[:2] == ["api", "models"] and parts[4] == "revision":
                self._send_info("/".join(parts[2:4]), parts[5])
            elif parts[2] == "resolve":
                self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body)
            else:
                raise _Refusal(404, "EntryNotFound")
        except _Refusal as refusal:
            self._send(refusal.status, b"", {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message})

    def _repository(self, name: str, revision: str) -> Repository:
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            raise _Refusal(401, "", "Invalid credentials in Authorization header")
        repository = self.of.repositories.get(name)
        if repository is None or (repository.readers == "token" and authorization is None):
            raise _Refusal(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
        if revision not in repository.revisions:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository

    def _send_info(self, name: str, revision: str) -> None:
        """Of gated repositories, too: anyone may look, as on the real one."""
        repository = self._repository(name, revision)
        siblings = [_sibling(path, content) for path, content in repository.files.items()]
        if not self.of.faults.knows_sizes:
            siblings = [{"rfilename": each["rfilename"]} for each in siblings]
        info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, revision: str, path: str, with_body: bool) -> None:
        repository = self._repository(name, revision)
        if repository.readers == "nobody":
            raise _Refusal(403, "GatedRepo", f"Access to model {name} is restricted")
        if path not in repository.files:
            raise _Refusal(404, "EntryNotFound", "Entry not found")
        content = repository.files[path]
        is_range = "Range" in self.headers and self.of.faults.knows_ranges
        offset = int((self.headers["Range"] if is_range else "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{_sibling(path, content)["blobId"]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if with_body:
            self.of.asked.append(Asked(path, offset))
        if is_range:
            headers["Content-Range"] = f"bytes {offset}-{len(content) - 1}/{len(content)}"
        self._send(206 if is_range else 200, self._faulty(path, content)[offset:], headers, path, offset)

    def _faulty(self, path: str, content: bytes) -> bytes:
        left = self.of.faults.damaged.get(path, 0)
        if left <= 0:
            return content
        self.of.faults.damaged[path] = left - 1
        return content[:-1] + bytes([content[-1] ^ 1])

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], path: str | None = None, offset: int = 0
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        faults = self.of.faults
        if path in faults.cut:
            self.wfile.write(body[: faults.cut[path]])
            self.close_connection = True
        elif path in faults.silent_after and not faults.released.is_set():
            self.wfile.write(body[: max(0, faults.silent_after[path] - offset)])
            self.wfile.flush()
            faults.reached.set()
            faults.released.wait(60)
            self.close_connection = True
        else:
            for start in range(0, len(body), _PIECE_BYTES):
                self.wfile.write(body[start : start + _PIECE_BYTES])
                if faults.bytes_per_second is not None:
                    time.sleep(_PIECE_BYTES / faults.bytes_per_second)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            """The client was killed, or gave up."""

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
    if len(content) >= LARGE_BYTES:
        sha256 = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
    return found
