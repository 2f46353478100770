"""The linear layer y = x @ W^T + b, in the forms in which its weight is kept: torch's, and our packed panels.

A packed weight is multiplied by the same instructions whatever the number of rows: each variant sums in an order of its
own, and a row's product must not depend on how many there are.
"""

import copy
import ctypes
import functools
from ctypes import CDLL
from typing import Protocol

import torch
from torch.nn import functional

from kvasir_runtime.kernels.huge_pages import use_huge_pages

MANY_ROWS = 64
MOST_TRIED_OUTPUTS = 4096
VARIANTS = {"fma": 0, "dot": 1, "amx": 2}
"""Instructions that can multiply our packed layout: float32 multiply-add, bf16 dot product, AMX tiles."""


class Linear(Protocol):
    @property
    def name(self) -> str:
        """Of what computes it, for logs and benchmarks."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """The product of x [..., K], any number of rows."""

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The weight's rows [T, K] for token ids int64 [T]: the input embedding of a model with tied embeddings."""


class PlainWeight:
    """As torch keeps it: any type, any device."""

    name = "torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight[token_ids]


class FilledUpWeight(PlainWeight):
    """float32 on a CPU, multiplied by numbers of rows for which torch's library sums each row alike: what is missing to
    such a number is filled up with zeros."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.multiple = multiple_of_rows(*weight.shape, torch.get_num_threads())
        """Of rows; None where the library has no such number."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[:-1].numel()
        if self.multiple is None or num_rows % self.multiple == 0:
            return super().__call__(x)
        rows = x.reshape(num_rows, x.shape[-1])
        filled = functional.pad(rows, (0, 0, 0, -num_rows % self.multiple))
        return super().__call__(filled)[:num_rows].view(*x.shape[:-1], self._weight.shape[0])


@functools.cache
def multiple_of_rows(outputs: int, inputs: int, num_threads: int) -> int | None:
    """The least of a few numbers such that any multiple of it is multiplied by a float32 weight [outputs, inputs] as
    many rows are, bit by bit; tried out once in a process for each shape and number of threads."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(outputs, MOST_TRIED_OUTPUTS), inputs, generator=generator)
    x = torch.randn(MANY_ROWS, inputs, generator=generator)
    among_many = functional.linear(x, weight)

    def is_alike(multiple: int) -> bool:
        tried = range(multiple, MANY_ROWS, multiple)
        return all(torch.equal(functional.linear(x[:num_rows], weight), among_many[:num_rows]) for num_rows in tried)

    return next((multiple for multiple in (1, 2, 4, 8, 16) if is_alike(multiple)), None)


def plain_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PlainWeight:
    is_on_cpu = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return FilledUpWeight(weight, bias) if is_on_cpu else PlainWeight(weight, bias)


class NativeWeight(ctypes.Structure):
    """PackedWeight of csrc/linear.cpp."""

    _fields_ = (
        ("pairs", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("panels", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    )


class Panels:
    """A weight [N, K] packed into panels of 16 outputs by pairs of inputs; one copy serves every instruction set."""

    def __init__(self, library: CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        outputs, inputs = weight.shape
        panels, depth = -(-outputs // 16), -(-inputs // 32) * 32
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._pairs = use_huge_pages(torch.empty(panels * 16 * depth, dtype=torch.bfloat16))
        library.kvasir_linear_pack(
            *(weight.data_ptr(), weight.stride(0), outputs, inputs, depth, self._pairs.data_ptr())
        )
        self._bias = None if bias is None else functional.pad(bias.float(), (0, panels * 16 - outputs))
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self.native = NativeWeight(self._pairs.data_ptr(), bias_address, outputs, inputs, panels, depth)


class PackedWeight:
    """Our panels, and the instructions that multiply them (csrc/linear.cpp)."""

    def __init__(self, library: CDLL, weight: torch.Tensor, bias: torch.Tensor | None, variant: str) -> None:
        """`variant` is one of VARIANTS."""
        self._library = library
        self._outputs, self._inputs = weight.shape
        self._panels = Panels(library, weight, bias)
        self._address = ctypes.addressof(self._panels.native)
        self._variant = variant

    def with_variant(self, variant: str) -> "PackedWeight":
        """The same memory, multiplied by other instructions."""
        other = copy.copy(self)
        other._variant = variant
        return other

    @property
    def name(self) -> str:
        return f"packed:{self._variant}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return self(x.reshape(-1, self._inputs)).view(*x.shape[:-1], self._outputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, self._outputs), dtype=torch.bfloat16)
        if num_rows > 0:
            self._library.kvasir_linear(
                *(self._address, VARIANTS[self._variant]),
                *(x.data_ptr(), x.stride(0), num_rows, out.data_ptr(), self._outputs),
            )
        return out

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*token_ids.shape, self._inputs), dtype=torch.bfloat16)
        ids = token_ids.contiguous()
        self._library.kvasir_linear_rows(self._address, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out
