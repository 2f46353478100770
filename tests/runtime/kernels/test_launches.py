"""Launches that Triton need not look at do what its own do, whatever comes as arguments."""

import pytest
import torch
import triton
import triton.language as tl
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS

from kvasir_runtime.kernels.launches import Launcher

pytestmark = GPU_MARKS
_SIZE = 64


@triton.jit
def _multiply_add_kernel(out, x, factor, added, SIZE: tl.constexpr, NEGATES: tl.constexpr):
    index = tl.arange(0, SIZE)
    result = tl.load(x + index).to(tl.float64) * factor + added
    tl.store(out + index, -result if NEGATES else result)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_arguments_of_every_kind_are_those_of_the_call(is_prepared: bool) -> None:
    launcher = Launcher(_multiply_add_kernel)
    base = torch.arange(2 * _SIZE, device=DEVICE)
    for _ in range(2):
        for dtype in (torch.float32, torch.int32, torch.float32):
            for offset in (0, 1, 16):  # of which 1 is not aligned
                x = base.to(dtype)[offset : offset + _SIZE]
                for factor in (1, 16, 17, 2**33, 2**40, 2.5):
                    for constants in ({"NEGATES": False}, {"NEGATES": True, "num_warps": 1}):
                        out = torch.empty(_SIZE, dtype=torch.float64, device=DEVICE)
                        if is_prepared:
                            launcher.prepare((1,), factor, 3, SIZE=_SIZE, **constants)(out, x)
                        else:
                            launcher((1,), out, x, factor, 3, SIZE=_SIZE, **constants)
                        expected = x.double() * factor + 3
                        assert torch.equal(out, -expected if constants["NEGATES"] else expected), (dtype, factor)
