"""The way of data between host and device: what a step's plan uploads and its result downloads passes here.

Not the tiles of a prefill (`attention/triton.py`) and what proposers copy: docs/decisions/0016 says why.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 8
"""Bytes; of each array within a packed upload."""


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
        self._results: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._results = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def upload(self, *arrays: NDArray[np.generic]) -> tuple[Tensor, ...]:
        """The arrays on the device, in one copy that nobody waits for. On CPU they must not be changed afterwards."""
        if self._results is None:
            return tuple(torch.from_numpy(array) for array in arrays)
        offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
        packed = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=True)
        host = packed.numpy()
        for array, offset in zip(arrays, offsets[:-1], strict=True):
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = packed.to(self.device, non_blocking=True)
        return tuple(_part(sent, array, int(offset)) for array, offset in zip(arrays, offsets[:-1], strict=True))

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying; on CUDA on a stream of its own, so that the next step's kernels do not wait."""
        if self._results is None:
            return Download(tensors)
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._results):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        for tensor in tensors:
            tensor.record_stream(self._results)
        return Download(copies, done)


def _part(packed: Tensor, array: NDArray[np.generic], offset: int) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return packed[offset : offset + array.nbytes].view(dtype).view(array.shape)
