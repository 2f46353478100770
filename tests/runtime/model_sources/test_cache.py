"""The folder of a model as a cache."""

import errno
import fcntl
from pathlib import Path

import pytest

from kvasir_runtime.errors import CacheUnavailableError, DiskFullError
from kvasir_runtime.model_sources.cache import ModelCache, storage_errors
from kvasir_runtime.model_sources.progress import Progress
from kvasir_runtime.model_sources.source import Listing, RemoteFile

CONFIG = RemoteFile("config.json", 2, "v1", None)
LISTING = Listing("abc", (CONFIG,))


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    """Complete."""
    cache = ModelCache(tmp_path / "model", "hf://org/name")
    with cache.filling(0.01):
        cache.prepare(LISTING, [CONFIG])
        (cache.folder / "config.json").write_text("{}")
        cache.complete(LISTING, [CONFIG])
    return cache


def test_is_complete_with_its_marker_and_every_file(cache: ModelCache) -> None:
    assert cache.is_complete
    assert not ModelCache(cache.folder, "hf://org/other").is_complete
    (cache.folder / "config.json").write_text("{ }")
    assert not cache.is_complete
    (cache.folder / "config.json").unlink()
    assert not cache.is_complete


def test_is_incomplete_from_the_moment_on_that_it_is_filled_anew(cache: ModelCache) -> None:
    cache.prepare(LISTING, [CONFIG])
    assert not cache.is_complete


def test_parts_of_another_revision_are_thrown_away(cache: ModelCache) -> None:
    cache.prepare(LISTING, [CONFIG])
    cache.part_of(CONFIG).write_text("{")
    cache.prepare(LISTING, [CONFIG])
    assert cache.bytes_present([CONFIG]) == 2
    newer = RemoteFile("config.json", 2, "v2", None)
    cache.prepare(Listing("def", (newer,)), [newer])
    assert not cache.part_of(CONFIG).exists()


def test_progress_is_read_by_whoever_waits(cache: ModelCache) -> None:
    assert cache.shared_progress() is None
    progress = Progress("hf://org/name", "downloading", 1, 2, 3.0, 4.0, 5.0)
    cache.share_progress(progress)
    assert cache.shared_progress() == progress


def test_room_is_asked_for_before_the_first_byte(cache: ModelCache) -> None:
    cache.require_space(10, 20, 20)
    with pytest.raises(DiskFullError, match=r"raise spec\.model\.cache\.sizeLimit"):
        cache.require_space(10, 21, 20)
    with pytest.raises(DiskFullError, match=r"takes 1000000000\.00 GB more, and .* has .* GB free"):
        cache.require_space(10**18, 10**18, None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_told_from_no_right(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFullError, match="is full"), storage_errors(tmp_path):
        raise OSError(number, "no room")
    refused = pytest.raises(CacheUnavailableError, match=r"cannot be written or locked by user .*fsGroup")
    with refused, storage_errors(tmp_path):
        raise OSError(errno.EACCES, "no right")


def test_a_folder_that_is_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(CacheUnavailableError), ModelCache(tmp_path / "model", "hf://a/b").filling(0.01):
        pytest.fail("it was locked")


def test_a_file_system_without_locks_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    refused = pytest.raises(CacheUnavailableError, match="knows no locks")
    with refused, ModelCache(tmp_path, "hf://a/b").filling(0.01):
        pytest.fail("it was locked")
