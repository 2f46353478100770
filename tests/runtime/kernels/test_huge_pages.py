"""Huge pages are asked for where they help, memory is found before it is written, and the tensor stays what it was."""

import mmap
import warnings
from pathlib import Path

import torch

from kvasir_runtime.kernels.huge_pages import populate, use_huge_pages

MIB = 1024 * 1024


def mapping_at(address: int) -> dict[str, list[str]]:
    """What the kernel says of the mapping that holds an address, in /proc/self/smaps: words by name."""
    said: dict[str, list[str]] = {}
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < end
        elif is_here:
            said[first.rstrip(":")] = words
    return said


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the mapping that a tensor begins in."""
    return int(mapping_at(tensor.data_ptr())["Rss"][0]) * 1024


def test_a_large_tensor_lies_in_memory_that_is_advised() -> None:
    tensor = torch.empty(32 * 1024 * 1024, dtype=torch.uint8)
    assert use_huge_pages(tensor) is tensor
    middle = tensor.data_ptr() + tensor.nbytes // 2
    assert "hg" in mapping_at(middle)["VmFlags"]


def test_a_small_tensor_is_left_alone() -> None:
    tensor = torch.arange(100)
    assert torch.equal(use_huge_pages(tensor), torch.arange(100))


def test_memory_is_there_before_it_is_written_and_keeps_what_was() -> None:
    with mmap.mmap(-1, 64 * MIB) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        tensor[5 * MIB] = 7
        before = resident_bytes(tensor)
        assert populate(tensor[4 * MIB : 12 * MIB])
        assert 6 * MIB <= resident_bytes(tensor) - before < 16 * MIB
        assert tensor[5 * MIB] == 7
        assert not tensor[6 * MIB : 12 * MIB].any()
        del tensor


def test_less_than_a_page_is_left_alone() -> None:
    assert populate(torch.arange(100))


def test_memory_that_cannot_be_written_is_told() -> None:
    with mmap.mmap(-1, MIB, prot=mmap.PROT_READ) as memory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about tensors over memory that is not writable
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        assert not populate(tensor)
        del tensor
