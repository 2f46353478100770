"""The memory under a rank's KV buffer: prepared piece by piece while there is no work, given back while the engine
sleeps, and taken again. The buffer and all views of it stay what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.kernels.huge_pages import give_back, use_huge_pages


@dataclass(frozen=True, slots=True)
class Preparation:
    """Something that makes later steps faster, and that holds only for memory that stays where it is."""

    do_next: Callable[[], bool]
    """One piece. False: all is there."""
    forget: Callable[[], None]
    """All of it, as the memory is given back."""


class KvMemory:
    def __init__(self, buffer: Tensor, preparations: Sequence[Preparation] = ()) -> None:
        """`buffer` uint8 [num_blocks, page_bytes]; of `preparations` the first that has anything left is done."""
        self._buffer = buffer
        self._preparations = preparations
        self._num_bytes = buffer.untyped_storage().nbytes()

    def prepare_next(self) -> bool:
        return any(preparation.do_next() for preparation in self._preparations)

    def release(self) -> None:
        """What the buffer holds is lost. On a CPU its addresses stay; on CUDA it has none until `restore`."""
        for preparation in self._preparations:
            preparation.forget()
        if self._buffer.is_cuda:
            torch.cuda.synchronize(self._buffer.device)
            self._buffer.untyped_storage().resize_(0)
            torch.cuda.empty_cache()
        else:
            give_back(self._buffer)

    def restore(self) -> None:
        """Raises RuntimeError where a device has not as much any more."""
        if self._buffer.is_cuda:
            self._buffer.untyped_storage().resize_(self._num_bytes)
        else:
            use_huge_pages(self._buffer)
