"""Compiling the kernels: once per machine, in whole or not at all, and with the compiler's own words when it fails."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from kvasir_runtime.kernels.build import KernelBuildError, build_library, find_compiler


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return folder


def compiler() -> str:
    found = find_compiler()
    assert found is not None
    return found


def test_a_second_build_reuses_the_first(sources: Path, tmp_path: Path) -> None:
    library = build_library(compiler(), tmp_path / "cache", sources)
    first_written = library.stat().st_mtime_ns
    assert build_library(compiler(), tmp_path / "cache", sources) == library
    assert library.stat().st_mtime_ns == first_written


def test_who_comes_while_another_compiles_waits_for_its_library(sources: Path, tmp_path: Path) -> None:
    compiled: list[Path] = []
    first_compiles, second_compiles = Event(), Event()

    def compile_slowly(compiler: str, library: Path, processor_flags: Sequence[str], sources: Path) -> None:
        compiled.append(library)
        (second_compiles if first_compiles.is_set() else first_compiles).set()
        second_compiles.wait(timeout=0.2)  # it must not come
        library.touch()

    given = (compiler(), tmp_path / "cache", sources, compile_slowly)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(build_library, *given)
        assert first_compiles.wait(timeout=10)
        second = pool.submit(build_library, *given)
        assert first.result() == second.result()
    assert compiled == [first.result()]


def test_changed_sources_are_another_library(sources: Path, tmp_path: Path) -> None:
    library = build_library(compiler(), tmp_path / "cache", sources)
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build_library(compiler(), tmp_path / "cache", sources) != library


def test_a_failing_compiler_is_quoted_and_leaves_no_library(sources: Path, tmp_path: Path) -> None:
    (sources / "broken.cpp").write_text("int broken( {\n")
    with pytest.raises(KernelBuildError, match=r"(?s)broken\.cpp.* ended with 1, expected 0.*error:"):
        build_library(compiler(), tmp_path / "cache", sources)
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_without_a_compiler_there_is_none_to_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
