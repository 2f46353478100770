"""The files of a listing, several at a time: each goes on from where an earlier run stopped, and is checked.

A file grows in the cache's parts and is renamed into place once its digest is right. A run that finds no marker
compares what is in its place all the same: nobody knows what became of it since.
"""

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import BinaryIO, Final

from kvasir_runtime.errors import ModelCorruptError, SourceUnreachableError
from kvasir_runtime.model_sources.cache import ModelCache, storage_errors
from kvasir_runtime.model_sources.digest import has_digest
from kvasir_runtime.model_sources.progress import ProgressMeter
from kvasir_runtime.model_sources.retries import RetryPolicy, persistently
from kvasir_runtime.model_sources.source import RemoteFile, Source

logger = logging.getLogger(__name__)

# One connection seldom fills a fast network.
_FILES_AT_ONCE: Final = 8


class Download:
    """Of one source into one cache, whose lock the caller holds."""

    def __init__(self, source: Source, cache: ModelCache, meter: ProgressMeter, retries: RetryPolicy) -> None:
        self._source = source
        self._cache = cache
        self._meter = meter
        self._retries = retries
        self._stopping = threading.Event()

    def run(self, files: Sequence[RemoteFile]) -> None:
        """Returns when all are in their places. Raises the first FetchError, after which no other file is begun."""
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="download") as pool:
            running = [pool.submit(self._fetch, file) for file in files]
            try:
                for each in as_completed(running):
                    each.result()
            except BaseException:
                self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: RemoteFile) -> None:
        """Returns early where another file has failed."""
        with storage_errors(self._cache.folder):
            target = self._cache.folder / file.path
            if self._is_intact(target, file):
                self._meter.add_kept(file.size_bytes)
                return
            part = self._cache.part_of(file)
            self._meter.add_kept(_size_bytes(part))
            self._complete(file, part)
            if not self._stopping.is_set() and not self._is_intact(part, file):
                self._fetch_again(file, part)
            if not self._stopping.is_set():
                target.parent.mkdir(exist_ok=True)
                part.replace(target)

    def _fetch_again(self, file: RemoteFile, part: Path) -> None:
        """From its first byte. Raises ModelCorruptError where that is damaged, too."""
        logger.warning("%s: %s is damaged, fetching it again", self._source.address, file.path)
        self._meter.add_kept(-_size_bytes(part))
        part.unlink()
        self._complete(file, part)
        if self._stopping.is_set() or self._is_intact(part, file):
            return
        size_bytes = _size_bytes(part)
        part.unlink()
        raise ModelCorruptError(
            f"{self._source.address}: {file.path} came twice and is not what the source says: {size_bytes} bytes, "
            f"expected {file.size_bytes} with {file.digest or 'no digest'}: is it damaged there, or by a proxy?"
        )

    def _is_intact(self, path: Path, file: RemoteFile) -> bool:
        """Reads all of it where its size is right and the source knows a digest."""
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            return False
        return file.digest is None or has_digest(path, file.digest, self._meter.note_compared)

    def _complete(self, file: RemoteFile, part: Path) -> None:
        """Until as many bytes are there as the file has."""
        persistently(lambda: self._append(file, part), self._retries, self._stopping, lambda: _size_bytes(part))

    def _append(self, file: RemoteFile, part: Path) -> None:
        with part.open("ab") as out:
            if out.tell() < file.size_bytes:
                self._copy(file, out)
            out.flush()
            os.fsync(out.fileno())  # before it is renamed into place: a marker must not outlive the bytes

    def _copy(self, file: RemoteFile, out: BinaryIO) -> None:
        with self._source.read(file, out.tell()) as chunks:
            for chunk in chunks:
                if self._stopping.is_set():
                    return
                out.write(chunk)
                self._meter.add_received(len(chunk))
        if out.tell() < file.size_bytes:
            raise SourceUnreachableError(
                f"{self._source.address}: {file.path} ended after {out.tell()} of {file.size_bytes} bytes"
            )


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
