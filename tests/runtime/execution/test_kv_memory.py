"""A KV buffer's memory is given back and taken again under views that stay."""

import ctypes
import mmap

import torch
from tests.runtime.kernels.triton_device import DEVICE

from kvasir_runtime.execution.kv_memory import KvMemory, Preparation
from kvasir_runtime.kernels.huge_pages import use_huge_pages

MIB = 2**20


def resident_bytes(buffer: torch.Tensor) -> int:
    """Of this buffer alone: what else the process holds comes and goes. Whole pages."""
    begin = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (buffer.data_ptr() + buffer.nbytes - begin) // mmap.PAGESIZE
    are_resident = (ctypes.c_ubyte * num_pages)()
    num_bytes = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), num_bytes, are_resident) == 0
    return sum(each & 1 for each in are_resident) * mmap.PAGESIZE


def test_pages_are_given_back_and_views_may_be_written_again() -> None:
    buffer = use_huge_pages(torch.empty((64, MIB), dtype=torch.uint8))
    view, memory = buffer[3].view(torch.float32), KvMemory(buffer)
    buffer.fill_(7)
    assert resident_bytes(buffer) > 56 * MIB
    memory.release()
    assert resident_bytes(buffer) < 8 * MIB
    memory.restore()
    view.fill_(1.5)
    assert buffer[3].view(torch.float32)[-1] == 1.5
    assert resident_bytes(buffer) < 16 * MIB


def test_a_devices_memory_is_given_back_and_views_may_be_written_again() -> None:
    buffer = torch.empty((64, MIB), dtype=torch.uint8, device=DEVICE)
    view, memory = buffer[3].view(torch.float32), KvMemory(buffer)
    memory.release()
    memory.restore()
    view.fill_(1.5)
    assert buffer[3].view(torch.float32)[-1] == 1.5


def test_what_was_prepared_is_forgotten_and_prepared_again() -> None:
    pieces = ["a", "b"]
    left = list(pieces)

    def do_next() -> bool:
        return bool(left) and bool(left.pop())

    memory = KvMemory(torch.empty((1, 16), dtype=torch.uint8), [Preparation(do_next, lambda: left.extend(pieces))])
    assert [memory.prepare_next() for _ in range(3)] == [True, True, False]
    memory.release()
    memory.restore()
    assert memory.prepare_next()
