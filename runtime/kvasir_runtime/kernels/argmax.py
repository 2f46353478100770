"""The index of each row's largest number: greedy sampling. The first of equals wins."""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [T] for logits [T, V]."""
    return logits.argmax(dim=-1)


def cpu_argmax(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled argmax."""
    native = library.kvasir_argmax

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        code = DTYPE_CODES.get(logits.dtype)
        if code is None or logits.stride(1) != 1:
            return argmax_reference(logits)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        native(code, logits.data_ptr(), logits.stride(0), out.data_ptr(), logits.shape[0], logits.shape[1])
        return out

    return argmax
