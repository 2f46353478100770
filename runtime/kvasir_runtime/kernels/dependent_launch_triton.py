"""Programmatic dependent launch, since Hopper: a kernel starts while the one before it runs, and waits for its end.

What is launched with `launch_pdl` waits in every program before it reads or writes what another kernel touches.
What lets the next kernel start needs no such care: the next one waits.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous():
    """Until it has ended and what it wrote can be read."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """Once every program has said so or ended, where the next one is launched with `launch_pdl`."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
