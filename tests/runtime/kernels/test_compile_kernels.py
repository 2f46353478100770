"""That Triton can compile the kernels that elsewhere run under its interpreter; no GPU is needed for it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.kernels import compile_kernels

ROOT = Path(__file__).parents[3]


def test_every_kernel_compiles_for_a_gpu_as_serving_calls_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'runtime'}{os.pathsep}{ROOT}"}
    child = subprocess.run(
        [sys.executable, compile_kernels.__file__], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "_decode_kernel" in child.stdout
