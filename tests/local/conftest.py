"""`kvasir-operator local` as a user runs it, examples/quickstart.yaml served by it, and what it must answer."""

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tests.controlplane.processes import wait_until
from tests.local.chats import greedy_answers

ROOT = Path(__file__).parents[2]
READY = re.compile(r"http://(127\.\S+)/v1 serves")
MARKER = "KVASIR_TEST_RUN"


class LocalService:
    """The running service. Its processes are found by an environment variable that all of them inherit."""

    def __init__(self, manifest: Path) -> None:
        self.run_id = uuid.uuid4().hex
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self._address = ""
        self._client: OpenAI | None = None
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "kvasir-operator"), "local", str(manifest), "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {MARKER: self.run_id},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := READY.search(line):
                self._address = match.group(1)
                self._is_ready.set()
        self._is_ready.set()

    def wait_ready(self) -> None:
        assert self._is_ready.wait(180), "".join(self.lines)
        assert self._address, "".join(self.lines)

    def wait_found(self, num_engines: int) -> None:
        """Of engines that are ready the router finds one first, and gives it what comes until it finds the others."""
        found = re.compile(r"endpoint \S+ is ready")
        lines = self.lines
        wait_until(lambda: len(found.findall("".join(lines))) == num_engines, 30, "the router to find all engines")

    @property
    def url(self) -> str:
        return f"http://{self._address}"

    def client(self) -> OpenAI:
        """One for all, which the service's end closes."""
        if self._client is None:
            self._client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        return self._client

    def processes(self) -> dict[int, str]:
        """Process id -> command line of everything that belongs to this run and is not a zombie."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            try:
                is_ours = folder.name.isdigit() and self.run_id.encode() in (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode() if is_ours else ""
            except OSError:  # gone in the meantime
                continue
            if command:
                found[int(folder.name)] = command
        return found

    def stop(self) -> int:
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture(scope="module")
def quickstart() -> Iterator[LocalService]:
    service = LocalService(ROOT / "examples" / "quickstart.yaml")
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="session")
def expected() -> dict[str, str]:
    """Hugging Face's greedy answer to each chat."""
    return greedy_answers()
