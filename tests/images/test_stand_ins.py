"""Empty libraries in the place of CUDA's, made for a torch of two small libraries that were linked against another."""

import subprocess
import sys
from pathlib import Path

import pytest

LOAD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL).of_torch())"


def link(library: Path, source: str, *options: str) -> None:
    library.with_suffix(".c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, library.with_suffix(".c"), *options], check=True)


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """libtorch_python.so -> libtorch.so -> libcublas.so.13 (versioned functions) and libnccl.so.2, which are gone."""
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "versions").write_text("libcublas.so.13 { *; };\n")
    cublas, nccl = tmp_path / "libcublas.so.13", tmp_path / "libnccl.so.2"
    version = f"-Wl,--version-script={tmp_path}/versions"
    link(cublas, "int multiply() { return 7; }", "-Wl,-soname,libcublas.so.13", version)
    link(nccl, "int reduce() { return 7; }", "-Wl,-soname,libnccl.so.2")
    source = "int multiply(); int reduce(); int add() { return multiply() + reduce(); }"
    link(folder / "libtorch.so", source, "-Wl,-soname,libtorch.so", str(cublas), str(nccl))
    link(
        folder / "libtorch_python.so",
        "int add(); int of_torch() { return add(); }",
        *("-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags", str(folder / "libtorch.so")),
    )
    cublas.unlink()
    nccl.unlink()
    return tmp_path


def make(images: Path, folder: Path) -> str:
    command = [sys.executable, images / "runtime" / "stand_ins.py", folder]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def load(folder: Path) -> subprocess.CompletedProcess[str]:
    library = folder / "torch" / "lib" / "libtorch_python.so"
    return subprocess.run([sys.executable, "-c", LOAD, library], capture_output=True, text=True)


def test_a_missing_library_fails_the_import(torch: Path) -> None:
    assert "libcublas.so.13: cannot open shared object file" in load(torch).stderr


def test_torch_loads_with_stand_ins_whose_functions_fail(images: Path, torch: Path) -> None:
    assert make(images, torch) == "libcublas.so.13: empty, 2 functions\nlibnccl.so.2: empty, 0 functions\n"
    assert load(torch).stdout == "2\n"


def test_libraries_that_are_there_are_left_alone(images: Path, torch: Path) -> None:
    make(images, torch)
    assert make(images, torch) == "torch's libraries lack nothing\n"
