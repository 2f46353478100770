"""That Triton compiles the kernels that elsewhere run under its interpreter, and none is worse than the committed table
says; no GPU is needed for it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.kernels import compile_kernels
from tests.runtime.kernels.compile_kernels import FLOAT32, TENSOR_CORES, Figures, Specialization, compare, read_table

ROOT = Path(__file__).parents[3]
GOOD = Figures(
    warps=4, registers=168, stack=0, shared=72_192, programs=3, buffers=2, copies=3, dots=TENSOR_CORES
)  # fmt: skip


def compile_them(cache: pytest.Cache, *options: str) -> None:
    """What was compiled before lies in pytest's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache.mkdir("triton"))
    environment["PYTHONPATH"] = f"{ROOT / 'runtime'}{os.pathsep}{ROOT}"
    command = [sys.executable, compile_kernels.__file__, *options]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


def test_every_kernel_compiles_for_a_hopper_as_serving_calls_it_and_none_is_worse_than_the_table(
    cache: pytest.Cache,
) -> None:
    compile_them(cache, "--quick")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_is_worse_than_the_table_in_any_size_on_any_architecture(cache: pytest.Cache) -> None:
    compile_them(cache)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shared": 240_000}, "wants 240000 bytes of shared memory, a program may have 232448"),
        ({"dots": "float32"}, "multiplies by float32, by tensor cores in the table"),
        ({"buffers": 1}, "keeps 1 buffers and 3 copies under way, 2 and 3 in the table"),
        ({"copies": 0}, "keeps 2 buffers and 0 copies under way, 2 and 3 in the table"),
        ({"stack": 640}, "spills 640 bytes, 0 in the table"),
    ],
)
@pytest.mark.parametrize("same_triton", [True, False])
def test_what_became_worse_is_said(change: dict[str, Any], problem: str, same_triton: bool) -> None:
    assert [*compare(GOOD, replace(GOOD, **change), 90, same_triton=same_triton)] == [problem]


def test_another_triton_may_use_some_more_registers() -> None:
    slightly_worse = replace(GOOD, registers=176, programs=2, stack=16)
    assert not [*compare(GOOD, slightly_worse, 90, same_triton=False)]
    assert [*compare(GOOD, slightly_worse, 90, same_triton=True)] == [
        "spills 16 bytes, 0 in the table",
        "fits 2 times into a multiprocessor, 3 times in the table",
    ]


def test_a_kernel_without_figures_is_said() -> None:
    assert [*compare(None, GOOD, 90, same_triton=True)] == ["is not in the table"]


def test_loads_of_decodes_and_of_prefills_overlap_products() -> None:
    _, table = read_table()
    for arch in (80, 90, 100):
        for case in ("Llama-1B", "Llama-8B"):
            for kernel in ("decode", "prefill"):
                figures = table[Specialization(arch, case, kernel)]
                assert figures.buffers >= 2, (arch, case, kernel)
                assert figures.copies >= 3, (arch, case, kernel)


def test_products_of_16_bits_use_tensor_cores() -> None:
    _, table = read_table()
    dots = {(FLOAT32 in found.case, figures.dots) for found, figures in table.items() if figures.dots}
    assert dots == {(False, TENSOR_CORES), (True, FLOAT32)}
