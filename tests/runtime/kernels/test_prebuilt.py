"""Kernels compiled ahead: the highest level that a processor has, never one of other sources."""

from pathlib import Path

import pytest

from kvasir_runtime.kernels.prebuilt import LEVELS, Level, choose_level, find_prebuilt, library_path

SKYLAKE_SERVER = LEVELS[2].instructions | {"sse4_2"}


@pytest.fixture
def skylake_server(tmp_path: Path) -> Path:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nmodel name\t: some\nflags\t\t: {' '.join(SKYLAKE_SERVER)}\nbugs\t\t:\n")
    return cpu_info


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_processor_gets_the_highest_level_that_it_has(level: Level) -> None:
    assert choose_level(level.instructions | {"sse4_2"}) == level
    assert choose_level(level.instructions - {"fma"}) is None


def test_the_library_of_this_processors_level_is_found(skylake_server: Path, tmp_path: Path) -> None:
    for level in LEVELS:
        library_path(tmp_path, level).touch()
    found = find_prebuilt(tmp_path, skylake_server)
    assert found is not None
    assert found.name.startswith("avx512-")


def test_a_library_of_other_sources_is_not_loaded(skylake_server: Path, tmp_path: Path) -> None:
    library_path(tmp_path, LEVELS[2]).with_name("avx512-0123456789abcdef0123.so").touch()
    assert find_prebuilt(tmp_path, skylake_server) is None


def test_a_source_tree_has_none() -> None:
    assert find_prebuilt() is None
