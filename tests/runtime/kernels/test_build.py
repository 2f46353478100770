"""Compiling the kernels: once per machine, in whole or not at all, and with the compiler's own words when it fails."""

from pathlib import Path

import pytest

from kvasir_runtime.kernels import build
from kvasir_runtime.kernels.build import KernelBuildError, build_library, find_compiler


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCE_FOLDER", folder)
    return folder


def compiler() -> str:
    found = find_compiler()
    assert found is not None
    return found


def test_a_second_build_reuses_the_first(sources: Path, tmp_path: Path) -> None:
    library = build_library(compiler(), tmp_path / "cache")
    first_written = library.stat().st_mtime_ns
    assert build_library(compiler(), tmp_path / "cache") == library
    assert library.stat().st_mtime_ns == first_written


def test_changed_sources_are_another_library(sources: Path, tmp_path: Path) -> None:
    library = build_library(compiler(), tmp_path / "cache")
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build_library(compiler(), tmp_path / "cache") != library


def test_a_failing_compiler_is_quoted_and_leaves_no_library(sources: Path, tmp_path: Path) -> None:
    (sources / "broken.cpp").write_text("int broken( {\n")
    with pytest.raises(KernelBuildError, match=r"(?s)broken\.cpp.* ended with 1, expected 0.*error:"):
        build_library(compiler(), tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_without_a_compiler_there_is_none_to_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
