"""The index of each row's largest number: greedy sampling. The first of equals wins."""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [T] for logits [T, V]; NaN counts as -inf, and where all are, 0 is returned."""
    return logits.masked_fill(logits.isnan(), float("-inf")).argmax(dim=-1)


def cpu_argmax(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled argmax."""
    native = library.kvasir_argmax

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype not in DTYPE_CODES or logits.stride(1) != 1:
            warn_of_twin("argmax", f"the logits are {logits.dtype} with strides {logits.stride()}")
            return argmax_reference(logits)
        rows, width = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        native(DTYPE_CODES[logits.dtype], logits.data_ptr(), logits.stride(0), out.data_ptr(), rows, width)
        return out

    return argmax
