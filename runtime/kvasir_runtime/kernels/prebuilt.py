"""CPU kernels compiled ahead, for images without a compiler: one library for each level of instructions.

`python -m kvasir_runtime.kernels.prebuilt FOLDER` compiles them. A library is named after its level and its sources, so
one that was compiled from other sources is never loaded.
"""

import hashlib
import logging
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from kvasir_runtime.kernels.build import SOURCE_FOLDER, KernelBuildError, compile_library, find_compiler

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "compiled"
"""Where an image puts them; not there in a source tree."""
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """`instructions`: what a processor must have, in the words of /proc/cpuinfo."""

    name: str
    compiler_flags: tuple[str, ...]
    instructions: frozenset[str]


_AVX2 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = _AVX2 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_AMX = _AVX512_BF16 | {"amx_bf16", "amx_tile"}

LEVELS = (
    Level("amx", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), _AMX),
    Level("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512_BF16),
    Level("avx512", ("-march=x86-64-v4",), _AVX512),
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
)
"""The kernels differ by these; the most able first."""


def find_prebuilt(folder: Path = FOLDER, cpu_info: Path = CPU_INFO) -> Path | None:
    """The library of the highest level that this processor has, or None where there is none for it."""
    if not folder.is_dir():
        return None
    level = choose_level(processor_instructions(cpu_info))
    if level is None or not library_path(folder, level).exists():
        logger.warning("the CPU kernels in %s are not for this processor or not of these sources", folder)
        return None
    return library_path(folder, level)


def choose_level(instructions: frozenset[str]) -> Level | None:
    return next((level for level in LEVELS if level.instructions <= instructions), None)


def processor_instructions(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Empty where the system does not say."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def library_path(folder: Path, level: Level) -> Path:
    digest = hashlib.sha256()
    for source in sorted(SOURCE_FOLDER.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return folder / f"{level.name}-{digest.hexdigest()[:20]}.so"


def compile_levels(folder: Path) -> None:
    """Raises KernelBuildError when there is no compiler, or when it fails."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError("no C++ compiler found, expected g++ on PATH; install it")
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS if platform.machine() == "x86_64" else ():
        compile_library(compiler, library_path(folder, level), level.compiler_flags)
        print(f"compiled {library_path(folder, level)}", flush=True)


if __name__ == "__main__":
    compile_levels(Path(sys.argv[1]))
