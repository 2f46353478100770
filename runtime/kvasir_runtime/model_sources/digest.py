"""Digests that hubs and object stores publish of a file, and how each is computed of one on disk."""

import hashlib
import io
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

Kind = Literal["sha256", "git-blob", "md5", "md5-of-parts", "crc32"]
OnRead = Callable[[int], None]
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """`value` as the source writes it: hexadecimal, but base64 for crc32.

    sha256: of the content. git-blob: what Git names it by. md5, md5-of-parts: ETags of S3 for objects that were
    uploaded at once, and in parts of `part_bytes`. crc32: S3's checksum of the whole object.
    """

    kind: Kind
    value: str
    part_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


def has_digest(path: Path, expected: Digest, on_read: OnRead | None = None) -> bool:
    """Reads the whole file."""
    return digest_of(path, expected.kind, expected.part_bytes, on_read) == expected.value


def digest_of(path: Path, kind: Kind, part_bytes: int = 0, on_read: OnRead | None = None) -> str:
    """Reads the whole file; raises OSError. `part_bytes` is of md5-of-parts alone. `on_read` is called with the number
    of bytes of each read."""
    with path.open("rb") if on_read is None else io.BufferedReader(_Watched(path, on_read), _READ_BYTES) as file:
        if kind == "md5-of-parts":
            return _md5_of_parts(file, path.stat().st_size, part_bytes)
        return _WHOLE[kind](file, path.stat().st_size)


class _Watched(io.FileIO):
    def __init__(self, path: Path, on_read: OnRead) -> None:
        super().__init__(path, "rb")
        self._on_read = on_read

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        self._on_read(num_bytes)
        return num_bytes


def _sha256(file: BinaryIO, size_bytes: int) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _md5(file: BinaryIO, size_bytes: int) -> str:
    return hashlib.file_digest(file, _new_md5).hexdigest()  # type: ignore[arg-type]


def _git_blob(file: BinaryIO, size_bytes: int) -> str:
    digest = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    for chunk in _chunks(file, size_bytes):
        digest.update(chunk)
    return digest.hexdigest()


def _crc32(file: BinaryIO, size_bytes: int) -> str:
    value = 0
    for chunk in _chunks(file, size_bytes):
        value = zlib.crc32(chunk, value)
    return b64encode(value.to_bytes(4, "big")).decode()


def _md5_of_parts(file: BinaryIO, size_bytes: int, part_bytes: int) -> str:
    """The MD5 of the parts' MD5s, and their number (S3's ETag of a multipart upload)."""
    parts = []
    for _ in range(0, size_bytes, part_bytes):
        digest = _new_md5()
        for chunk in _chunks(file, part_bytes):
            digest.update(chunk)
        parts.append(digest.digest())
    whole = _new_md5()
    whole.update(b"".join(parts))
    return f"{whole.hexdigest()}-{len(parts)}"


def _chunks(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """Up to `size_bytes` from where the file stands."""
    while size_bytes > 0 and (chunk := file.read(min(_READ_BYTES, size_bytes))):
        size_bytes -= len(chunk)
        yield chunk


def _new_md5() -> "hashlib._Hash":
    """Against damage, not against forgery: allowed where the system forbids MD5 for security (FIPS)."""
    return hashlib.md5(usedforsecurity=False)


_WHOLE: Final[dict[str, Callable[[BinaryIO, int], str]]] = {
    "sha256": _sha256,
    "md5": _md5,
    "git-blob": _git_blob,
    "crc32": _crc32,
}
