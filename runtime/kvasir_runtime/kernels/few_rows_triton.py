"""A linear layer of few rows in Triton, whose time is that of reading the weight: decodes on GPUs.

A program has few outputs, so that even a narrow weight has programs for the whole GPU. Its warps share out the inputs,
each sums a part of them, and the parts are added in order. Several tiles of the weight are under way at any time.
A row's result depends neither on the other rows nor, up to MOST_ROWS, on their number; the torch twin is `PlainWeight`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.launches import Launcher
from kvasir_runtime.kernels.linear import PlainWeight

MOST_ROWS = 16
"""From here on cuBLAS, whose kernels keep busy what multiplies, too."""
FEWEST_OUTPUTS = 512
"""Of a weight that gives enough programs something to read."""
DTYPES = (torch.bfloat16, torch.float16)
ALIGNED = 16
"""Inputs whose multiples let every row of a weight be read in 16 bytes a thread, as Triton knows."""
PROGRAM_BYTES = 96 * 1024
"""Of shared memory, which every architecture since 8.0 gives a program."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Of the weight, as a program reads it at once, and how it is run."""

    outputs: int
    inputs: int
    num_warps: int
    """Each sums its part of the inputs: with `inputs` it decides the order of summation, nothing else does."""
    num_stages: int
    """One more than there are buffers, where shared memory has room."""

    def __str__(self) -> str:
        return f"{self.outputs} x {self.inputs}, {self.num_warps} warps, {self.num_stages} stages"

    def stages(self, num_rows: int) -> int:
        buffer_bytes = (self.outputs + num_rows) * self.inputs * 2
        return min(self.num_stages, 1 + PROGRAM_BYTES // buffer_bytes)


NARROW = Tile(outputs=16, inputs=512, num_warps=8, num_stages=5)
MEDIUM = Tile(outputs=16, inputs=512, num_warps=4, num_stages=4)
WIDE = Tile(outputs=32, inputs=256, num_warps=4, num_stages=5)
NARROW_OUTPUTS, MEDIUM_OUTPUTS = 2048, 8192


def choose_tile(num_outputs: int) -> Tile:
    """By the weight alone, since another tile may sum in another order."""
    if num_outputs <= NARROW_OUTPUTS:
        return NARROW
    return MEDIUM if num_outputs <= MEDIUM_OUTPUTS else WIDE


def suits(weight: torch.Tensor) -> bool:
    """Whether few rows of it are multiplied here."""
    num_outputs, num_inputs = weight.shape
    return weight.dtype in DTYPES and num_outputs >= FEWEST_OUTPUTS and num_inputs % ALIGNED == 0


class FewRowsWeight(PlainWeight):
    """As torch keeps it, multiplied here by up to MOST_ROWS rows, by torch's library beyond."""

    name = "few rows"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None) -> None:
        super().__init__(weight.contiguous(), bias)
        self._tile = tile or choose_tile(len(weight))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[:-1].numel()
        if not 0 < num_rows <= MOST_ROWS:
            return super().__call__(x)
        num_outputs, num_inputs = self._weight.shape
        rows = x.reshape(num_rows, num_inputs)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = x.new_empty((num_rows, num_outputs))
        tile, padded_rows = self._tile, 8 if num_rows <= 8 else MOST_ROWS
        _launch_few_rows(
            (triton.cdiv(num_outputs, tile.outputs),),
            self._weight, rows, rows.stride(0), self._bias, out, num_rows, num_outputs, num_inputs,
            HAS_BIAS=self._bias is not None, ROWS=padded_rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            PARTS=tile.num_warps,
            WIDENS=x.device.type == "cpu",  # the interpreter has no bf16 dots
            num_warps=tile.num_warps, num_stages=tile.stages(padded_rows),
        )  # fmt: skip
        return out.view(*x.shape[:-1], num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    weight, x, x_stride, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs). Tiles are [part, output, input], so that each warp multiplies a part."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part_inputs: tl.constexpr = INPUTS // PARTS
    inputs = tl.arange(0, PARTS)[:, None] * part_inputs + tl.arange(0, part_inputs)[None, :]
    is_row, is_column = rows < num_rows, columns < num_outputs
    weight_tile = weight + columns.to(tl.int64)[None, :, None] * num_inputs + inputs[:, None, :]
    x_tile = x + rows[None, None, :] * x_stride + inputs[:, :, None]
    part_sums = tl.zeros((PARTS, OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        is_input = first + inputs < num_inputs
        left = tl.load(weight_tile + first, mask=is_column[None, :, None] & is_input[:, None, :], other=0.0)
        right = tl.load(x_tile + first, mask=is_row[None, None, :] & is_input[:, :, None], other=0.0)
        if WIDENS:
            left, right = left.to(tl.float32), right.to(tl.float32)
        part_sums = tl.dot(left, right, part_sums, input_precision="ieee")
    sums = tl.sum(part_sums, 0)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = out + rows[None, :] * num_outputs + columns[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


_launch_few_rows = Launcher(_few_rows_kernel)
