"""A linear layer of few rows in Triton, whose time is that of reading the weight: decodes on GPUs.

A program has few outputs, so that even a narrow weight has programs for the whole GPU. Its warps share out the inputs,
each sums a part of them, and the parts are added in order. Several tiles of the weight are under way at any time, and
the first are prefetched while the kernel before still runs.

A row's result depends neither on the other rows nor, up to MOST_ROWS, on their number. The torch twin is `PlainWeight`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from kvasir_runtime.kernels.dependent_launch_triton import has_dependent_launch, let_next_start, wait_for_previous
from kvasir_runtime.kernels.launches import Launcher
from kvasir_runtime.kernels.linear import PlainWeight

MOST_ROWS = 8
"""Beyond, cuBLAS reads a weight as fast, and multiplies faster."""
FEWEST_OUTPUTS = 512
"""Fewer make fewer programs than it takes to read at full speed."""
DTYPES = (torch.bfloat16, torch.float16)
ALIGNED = 16
"""Of which the inputs are a multiple: then Triton reads a weight by 16 bytes a thread."""
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


PREFETCHED_BYTES = 32 * 1024
"""Of the weight by a program while the kernel before runs: some 10 MB on all of a GPU, which its L2 cache holds."""
NARROW = Tile(outputs=16, inputs=512, num_warps=4, num_stages=5)
SHORT = Tile(outputs=16, inputs=256, num_warps=4, num_stages=7)
WIDE = Tile(outputs=64, inputs=128, num_warps=2, num_stages=5)
WIDE_FROM, SHORT_TO = 65536, 1024
"""Outputs, as of a head, and inputs: benchmarks/results/gpu-2026-11-27-few-rows.md."""


def choose_tile(num_outputs: int, num_inputs: int) -> Tile:
    """By the weight alone, since another tile may sum in another order."""
    if num_outputs >= WIDE_FROM:
        return WIDE
    return SHORT if num_inputs <= SHORT_TO else NARROW


def suits(weight: torch.Tensor) -> bool:
    """Whether few rows of it are multiplied here."""
    num_outputs, num_inputs = weight.shape
    return weight.dtype in DTYPES and num_outputs >= FEWEST_OUTPUTS and num_inputs % ALIGNED == 0


class FewRowsWeight(PlainWeight):
    """As torch keeps it, multiplied here by up to MOST_ROWS rows, by torch's library beyond."""

    name = "few rows"

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None, *, starts_early: bool = True
    ) -> None:
        """`starts_early`: where the GPU can, it prefetches while the kernel before it runs."""
        super().__init__(weight.contiguous(), bias)
        self._starts_early = starts_early and has_dependent_launch(weight.device)
        self._tile = tile or choose_tile(*weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[:-1].numel()
        if not 0 < num_rows <= MOST_ROWS:
            return super().__call__(x)
        num_outputs, num_inputs = self._weight.shape
        rows = x.reshape(num_rows, num_inputs)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = x.new_empty((num_rows, num_outputs))
        tile = self._tile
        _launch_few_rows(
            (triton.cdiv(num_outputs, tile.outputs),),
            self._weight, rows, rows.stride(0), self._bias, out, num_rows, num_outputs, num_inputs,
            HAS_BIAS=self._bias is not None, ROWS=MOST_ROWS, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            PARTS=tile.num_warps, PREFETCHED=PREFETCHED_BYTES // 2 // tile.outputs,
            WIDENS=x.device.type == "cpu",  # the interpreter has no bf16 dots
            num_warps=tile.num_warps, num_stages=tile.stages(MOST_ROWS), launch_pdl=self._starts_early,
        )  # fmt: skip
        return out.view(*x.shape[:-1], num_outputs)

    def compile(self) -> None:
        """All that any number of rows needs."""
        self(self._weight.new_zeros(1, self._weight.shape[1]))


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    weight, x, x_stride, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    PREFETCHED: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs). Tiles are [part, output or row, input]: each warp multiplies a part, and shared memory
    is swizzled over outputs and rows, else their reads would be of one bank."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part_inputs: tl.constexpr = INPUTS // PARTS
    inputs = tl.arange(0, PARTS)[:, None] * part_inputs + tl.arange(0, part_inputs)[None, :]
    is_row, is_column = rows < num_rows, columns < num_outputs
    _prefetch(weight, columns, is_column, num_inputs, PREFETCHED)
    wait_for_previous()
    let_next_start()
    weight_tile = weight + columns.to(tl.int64)[None, :, None] * num_inputs + inputs[:, None, :]
    x_tile = x + rows[None, :, None] * x_stride + inputs[:, None, :]
    part_sums = tl.zeros((PARTS, OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        is_input = first + inputs < num_inputs
        left = tl.load(weight_tile + first, mask=is_column[None, :, None] & is_input[:, None, :], other=0.0)
        right = tl.load(x_tile + first, mask=is_row[None, :, None] & is_input[:, None, :], other=0.0)
        if WIDENS:
            left, right = left.to(tl.float32), right.to(tl.float32)
        part_sums = tl.dot(left, tl.permute(right, (0, 2, 1)), part_sums, input_precision="ieee")
    sums = tl.sum(part_sums, 0)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = out + rows[None, :] * num_outputs + columns[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit
def _prefetch(weight, columns, is_column, num_inputs, PREFETCHED: tl.constexpr):
    """Into the L2 cache the first inputs of these columns, in lines of 128 bytes."""
    if cuda_capability_geq(9, 0):
        inputs = tl.arange(0, PREFETCHED // 64) * 64
        lines = weight + columns.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
        lines = tl.where(is_column[:, None] & (inputs < num_inputs)[None, :], lines, weight)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


_launch_few_rows = Launcher(_few_rows_kernel)
