"""A model's folder as a cache that several processes share: who fills it, what is in it, and whether it is complete.

Everything of ours lies in `.kvasir/` below the folder. The marker `complete.json` is renamed into place after the last
file was checked, so a folder that has it holds the model; one that was being filled when its process was killed has the
lock free again and its parts to go on from.
"""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from kvasir_runtime.errors import CacheUnavailableError, DiskFullError
from kvasir_runtime.model_sources.progress import Progress, as_text
from kvasir_runtime.model_sources.source import Listing, RemoteFile

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ModelCache:
    """Of the model of `address` in `folder`. Methods raise CacheUnavailableError and DiskFullError."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self._address = address
        self._own = folder / ".kvasir"

    @property
    def is_complete(self) -> bool:
        """Whether the marker is there, of this model, and every file with its size. Nothing is written."""
        marker = self._read("complete.json")
        if marker is None or marker["address"] != self._address:
            return False
        return all(_size_bytes(self.folder / each["path"]) == each["size_bytes"] for each in marker["files"])

    @contextmanager
    def filling(self, poll_seconds: float) -> Iterator[None]:
        """Held by one process at a time, however it ends; others wait for it."""
        lock = FileLock(self._own / "lock", fallback_to_soft=False)  # which would outlive its owner
        with storage_errors(self.folder):
            self._own.mkdir(parents=True, exist_ok=True)
            _acquire(lock, poll_seconds)
        try:
            yield
        finally:
            lock.release()

    def prepare(self, listing: Listing, files: Collection[RemoteFile]) -> None:
        """Takes away the marker, and the files of another revision that this one does not have."""
        content = self._content(listing, files)
        former = self._read("files.json") or {"files": []}
        wanted = {each["path"] for each in content["files"]}
        with storage_errors(self.folder):
            (self._own / "complete.json").unlink(missing_ok=True)
            for path in {each["path"] for each in former["files"]} - wanted:
                (self.folder / path).unlink(missing_ok=True)
            self._write("files.json", content)
            self._keep_parts(files)

    def _keep_parts(self, files: Collection[RemoteFile]) -> None:
        """Of these, and of no others: what they grew in was for another revision."""
        parts = self._own / "parts"
        parts.mkdir(exist_ok=True)
        for part in set(parts.iterdir()) - {self.part_of(file) for file in files}:
            part.unlink()

    def part_of(self, file: RemoteFile) -> Path:
        """Where the file grows; another one for other content."""
        name = sha256(f"{file.path}\0{file.version}".encode()).hexdigest()[:32]
        return self._own / "parts" / name

    def bytes_present(self, files: Collection[RemoteFile]) -> int:
        """Of these files, in their places or in parts; whether they are right is not looked at."""
        return sum(_size_bytes(self.folder / file.path) or _size_bytes(self.part_of(file)) or 0 for file in files)

    def require_space(self, missing_bytes: int, total_bytes: int, size_limit_bytes: int | None) -> None:
        """Raises DiskFullError where it is known before the first byte. `size_limit_bytes`: of the volume."""
        if size_limit_bytes is not None and total_bytes > size_limit_bytes:
            raise DiskFullError(
                f"{self._address} takes {as_text(total_bytes)}, and the cache may hold "
                f"{as_text(size_limit_bytes)}: raise spec.model.cache.sizeLimit"
            )
        free_bytes = shutil.disk_usage(self.folder).free
        if missing_bytes > free_bytes:
            missing, free = as_text(missing_bytes), as_text(free_bytes)
            raise DiskFullError(
                f"{self._address} takes {missing} more, and {self.folder} has {free} free: make room, or choose a "
                "larger volume"
            )

    def complete(self, listing: Listing, files: Collection[RemoteFile]) -> None:
        with storage_errors(self.folder):
            self._write("complete.json", self._content(listing, files))
            shutil.rmtree(self._own / "parts")
            (self._own / "progress.json").unlink(missing_ok=True)

    def share_progress(self, progress: Progress) -> None:
        """With the processes that wait for this one."""
        with storage_errors(self.folder):
            self._write("progress.json", progress.as_json())

    def shared_progress(self) -> Progress | None:
        """Of the process that fills the cache; None where nothing is known of it."""
        content = self._read("progress.json")
        return None if content is None else Progress.from_json(content)

    def _content(self, listing: Listing, files: Collection[RemoteFile]) -> dict[str, Any]:
        return {"address": self._address, "revision": listing.revision, "files": [asdict(file) for file in files]}

    def _read(self, name: str) -> Any:
        """None where it is not there."""
        try:
            return json.loads((self._own / name).read_text())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheUnavailableError(f"{self._own / name} cannot be read: {error}") from error

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """At once, or not at all."""
        draft = self._own / f"{name}.new"
        with draft.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._own / name)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """What the file system refuses, in our words."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(f"{folder} is full: {error}: make room, or choose a larger volume") from error
        raise CacheUnavailableError(
            f"{folder} cannot be written or locked by user {os.getuid()}: {error}: let that user write there "
            "(spec.pod.securityContext.fsGroup for a claim, the owner of the folder for a hostPath)"
        ) from error


def _acquire(lock: FileLock, poll_seconds: float) -> None:
    try:
        lock.acquire(poll_interval=poll_seconds)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise CacheUnavailableError(f"{lock.lock_file} cannot be locked: its file system knows no locks") from error


def _size_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
