"""Where the Triton kernels are tested: on a GPU where there is one, under Triton's interpreter elsewhere."""

import os

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
GPU_MARKS = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
"""Of what runs in both places, so that `pytest -m gpu` runs it on a GPU."""
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 1.5e-2, "rtol": 1e-2}}


def on_device(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)
