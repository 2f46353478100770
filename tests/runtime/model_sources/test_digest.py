"""Digests as hubs and object stores publish them."""

from pathlib import Path

import pytest

from kvasir_runtime.model_sources.digest import Digest, Kind, digest_of, has_digest

# As sha256sum, `git hash-object`, md5sum, S3's ETag of parts of 4 bytes, and S3's ChecksumCRC32 say of these bytes.
CONTENT = b"hello world"
KNOWN: list[tuple[Kind, int, str]] = [
    ("sha256", 0, "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9"),
    ("git-blob", 0, "95d09f2b10159347eece71399a7e2e907ea3df4f"),
    ("md5", 0, "5eb63bbbe01eeed093cb22bb8f5acdc3"),
    ("crc32", 0, "DUoRhQ=="),
]


@pytest.mark.parametrize(("kind", "part_bytes", "value"), KNOWN, ids=[kind for kind, _, _ in KNOWN])
def test_is_that_of_the_tool_that_defines_it(tmp_path: Path, kind: Kind, part_bytes: int, value: str) -> None:
    (tmp_path / "file").write_bytes(CONTENT)

    assert digest_of(tmp_path / "file", kind, part_bytes) == value
    (tmp_path / "file").write_bytes(CONTENT[:-1] + b"D")
    assert not has_digest(tmp_path / "file", Digest(kind, value, part_bytes))


@pytest.mark.parametrize("kind", [*(kind for kind, _, _ in KNOWN), "md5-of-parts"])
def test_says_how_much_it_has_read(tmp_path: Path, kind: Kind) -> None:
    content = b"x" * 5_000_000
    (tmp_path / "file").write_bytes(content)
    read: list[int] = []

    assert digest_of(tmp_path / "file", kind, 2_000_000, read.append) == digest_of(tmp_path / "file", kind, 2_000_000)
    assert sum(read) == len(content)
    assert max(read) <= len(content) / 4, "often, so that a large file is no silence"


@pytest.mark.parametrize(("size_bytes", "num_parts"), [(7, 2), (8, 2), (9, 3), (1, 1)])
def test_the_last_part_of_an_upload_may_be_smaller(tmp_path: Path, size_bytes: int, num_parts: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * size_bytes)

    assert digest_of(tmp_path / "file", "md5-of-parts", 4).endswith(f"-{num_parts}")
