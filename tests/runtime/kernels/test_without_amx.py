"""What runs without permission for AMX tiles takes the AVX-512 paths, as on a processor that has none."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_runtime.kernels.linear import VARIANTS
from kvasir_runtime.kernels.native import load_library

TOOL = Path(__file__).parents[3] / "benchmarks" / "without_amx.py"
ASK = f"""
from kvasir_runtime.kernels.native import load_library
print(load_library().kvasir_linear_has({VARIANTS["amx"]}))
"""


def test_our_kernels_see_no_amx_behind_the_filter() -> None:
    if not load_library().kvasir_linear_has(VARIANTS["amx"]):
        pytest.skip("this processor has no AMX to hide")
    command = [sys.executable, str(TOOL), sys.executable, "-c", ASK]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"
