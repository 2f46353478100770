"""Compiling the C++ kernels on the machine that runs them, once, into a cache outside the source tree.

The cache key covers the sources, flags, compiler, processor and torch, so none is loaded where it does not fit.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from kvasir_runtime.errors import KvasirRuntimeError

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
# No -ffast-math: masked scores are infinities. The library shares torch's OpenMP threads, because the loader finds
# torch's libgomp by its soname when torch was imported first.
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fno-math-errno", "-w")
NATIVE = ("-march=native",)


class KernelBuildError(KvasirRuntimeError):
    """A compiler is there, but it cannot build the kernels; the message holds what it said."""


CompileKernels = Callable[[str, Path, Sequence[str], Path], None]
"""As `compile_library`."""


def find_compiler() -> str | None:
    """Path of the C++ compiler, or None when the machine has none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def build_library(
    compiler: str,
    cache_folder: Path | None = None,
    sources: Path = SOURCE_FOLDER,
    compile_kernels: CompileKernels | None = None,
) -> Path:
    """Return the path of the compiled kernels, compiling them (about 10 s) when the cache does not hold them.

    Raises KernelBuildError when the compiler fails.
    """
    folder = cache_folder or default_cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / f"kernels-{_fingerprint(compiler, sources)}.so"
    if library.exists():
        return library
    with FileLock(folder / "lock"):
        if not library.exists():
            started = time.monotonic()
            logger.info("compiling the CPU kernels with %s, once for this machine", compiler)
            (compile_kernels or compile_library)(compiler, library, NATIVE, sources)
            logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, library)
    return library


def default_cache_folder() -> Path:
    """Where compiled kernels are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvasir" / "kernels"


def compile_library(compiler: str, library: Path, processor_flags: Sequence[str], folder: Path = SOURCE_FOLDER) -> None:
    """Write the kernels for the processors that the flags name, in whole or not at all. Raises KernelBuildError."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        sources = sorted(folder.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        compiles = [
            [compiler, *FLAGS, *processor_flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        _run_all(compiles)
        linked = Path(scratch) / "kernels.so"
        _run_all([[compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(linked)]])
        linked.replace(library)


def _run_all(commands: list[list[str]]) -> None:
    """Run the commands side by side; the first failure is raised with its output after all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise KernelBuildError(
                f"compiling the CPU kernels failed: `{' '.join(command)}` ended with {process.returncode}, expected 0. "
                f"Install a g++ of version 10 or newer, or choose the reference kernels. It said:\n{output.strip()}"
            )


def _fingerprint(compiler: str, sources: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    compiler_version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (*FLAGS, *NATIVE, compiler_version, _processor(), version("torch")):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    first = {line.split(":", 1)[0].strip(): line for line in reversed(lines) if ":" in line}
    return platform.machine() + "".join(first[name] for name in kept if name in first)
