"""Huge pages are asked for where they help, and the tensor stays what it was."""

from pathlib import Path

import torch

from kvasir_runtime.kernels.huge_pages import use_huge_pages


def flags_at(address: int) -> set[str]:
    """What the kernel was told of the mapping that holds an address (VmFlags of /proc/self/smaps)."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < end
        elif is_here and first == "VmFlags:":
            return set(line.split()[1:])
    return set()


def test_a_large_tensor_lies_in_memory_that_is_advised() -> None:
    tensor = torch.empty(32 * 1024 * 1024, dtype=torch.uint8)
    assert use_huge_pages(tensor) is tensor
    middle = tensor.data_ptr() + tensor.nbytes // 2
    assert "hg" in flags_at(middle)


def test_a_small_tensor_is_left_alone() -> None:
    tensor = torch.arange(100)
    assert torch.equal(use_huge_pages(tensor), torch.arange(100))
