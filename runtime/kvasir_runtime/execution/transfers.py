"""The way of data between host and device: what a step's plan uploads and its result downloads passes here.

Not the tiles of a prefill (`attention/triton.py`) and what proposers copy: docs/decisions/0016 says which.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; of each array within a packed upload. Triton compiles a kernel anew for addresses that are not a multiple of
it."""


class Download:
    """Tensors on their way to the host; `arrays` waits for them."""

    def __init__(self, tensors: Sequence[Tensor], done: "torch.cuda.Event | None" = None) -> None:
        self._tensors = tensors
        self._done = done

    def arrays(self) -> list[NDArray[Any]]:
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class Transfers:
    """To and from one device. On CPU both sides are the same memory, and nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        """Whether what the device holds may be read without waiting."""
        self._results: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._results = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def upload(self, *arrays: NDArray[np.generic]) -> tuple[Tensor, ...]:
        """The arrays on the device, in one copy that nobody waits for. On CPU they must not be changed afterwards."""
        if self._results is None:
            return tuple(map(torch.from_numpy, arrays))
        return unpack(pack(arrays, pin_memory=True).to(self.device, non_blocking=True), arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying; on CUDA on a stream of its own, so that the next step's kernels do not wait."""
        if self._results is None:
            return Download(tensors)
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._results):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits sleeps
            done.record()
        for tensor in tensors:
            tensor.record_stream(self._results)
        return Download(copies, done)


def pack(arrays: Sequence[NDArray[np.generic]], *, pin_memory: bool) -> Tensor:
    """The bytes uint8 [n] of all arrays, for one copy."""
    offsets = _offsets(arrays)
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=pin_memory)
    host = packed.numpy()
    for array, offset in zip(arrays, offsets[:-1], strict=True):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, arrays: Sequence[NDArray[np.generic]]) -> tuple[Tensor, ...]:
    """Views of packed arrays, which may lie elsewhere by now."""
    return tuple(_part(packed, array, offset) for array, offset in zip(arrays, _offsets(arrays)[:-1], strict=True))


def _offsets(arrays: Sequence[NDArray[np.generic]]) -> list[int]:
    """Of each array, then where the last ends."""
    sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    return list(accumulate(sizes, initial=0))


def _part(packed: Tensor, array: NDArray[np.generic], offset: int) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return packed[offset : offset + array.nbytes].view(dtype).view(array.shape)
