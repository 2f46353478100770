"""The products of a mixture of experts in Triton: one launch over tiles of all experts' rows.

How many rows an expert has is known on the device alone. So the grid has room for the most tiles that any routing could
need; each program finds its expert from the ends of the groups, and those beyond the last tile return. Nothing is read
by the host, and a CUDA graph of the launch stays right. The torch twin is `SeparateExperts`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvasir_runtime.kernels.experts import ExpertGroups


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's product, and how it is run."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int


FEW_ROWS = Tile(rows=16, outputs=64, inputs=128, num_warps=4)
"""Where the weights' bytes decide: decodes."""
MANY_ROWS = Tile(rows=64, outputs=128, inputs=64, num_warps=4)
MANY_FROM = 32
"""Mean rows of an expert."""


def choose_tile(num_pairs: int, num_experts: int) -> Tile:
    """By shapes alone, since the host does not know the routing."""
    return MANY_ROWS if num_pairs >= MANY_FROM * num_experts else FEW_ROWS


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Tiles of rows that the pairs can take at most: each expert that has rows may waste part of one."""
    busy = min(num_pairs, num_experts)
    return busy + (num_pairs - busy) // tile_rows


class TritonExperts:
    """All experts' weights in one tensor [num_experts, N, K]."""

    name = "triton"

    def __init__(self, weights: Iterator[torch.Tensor], num_experts: int, *, has_one_tile: bool = False) -> None:
        """`has_one_tile`: of one shape for any number of pairs, so that a row's result is its own."""
        self._has_one_tile = has_one_tile
        for index, weight in enumerate(weights):
            if index == 0:
                self._weights = weight.new_empty((num_experts, *weight.shape))
            self._weights[index].copy_(weight)

    def multiply_tokens(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        return self._multiply(x, groups, gathers=True)

    def multiply_pairs(self, x: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        return self._multiply(x, groups, gathers=False)

    def _multiply(self, x: torch.Tensor, groups: ExpertGroups, *, gathers: bool) -> torch.Tensor:
        num_experts, num_outputs, num_inputs = self._weights.shape
        num_pairs = len(groups.pairs)
        out = x.new_empty((num_pairs, num_outputs))
        tile = MANY_ROWS if self._has_one_tile else choose_tile(num_pairs, num_experts)
        grid = (triton.cdiv(num_outputs, tile.outputs), max_tiles(num_pairs, num_experts, tile.rows))
        _grouped_linear_kernel[grid](
            x, x.stride(0), self._weights, out, groups.pairs, groups.ends, num_experts, num_outputs, num_inputs,
            TOP_K=groups.top_k, GATHERS=gathers, PADDED_EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            WIDENS=x.device.type == "cpu",  # the interpreter has no bf16 dots
            num_warps=tile.num_warps,
        )  # fmt: skip
        return out


@triton.jit
def _grouped_linear_kernel(
    x, x_stride, weights, out, pairs, ends, num_experts, num_outputs, num_inputs,
    TOP_K: tl.constexpr, GATHERS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, tile of rows), so that the programs of one expert's rows follow each other."""
    tile = tl.program_id(1)
    experts = tl.arange(0, PADDED_EXPERTS)
    is_expert = experts < num_experts
    group_ends = tl.load(ends + experts, mask=is_expert, other=0)
    group_starts = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles_of = tl.where(is_expert, (group_ends - group_starts + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(tiles_of, 0)
    if tile >= tl.sum(tiles_of, 0):
        return
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    is_mine = experts == expert
    start = tl.sum(tl.where(is_mine, group_starts + (tile - tile_ends + tiles_of) * ROWS, 0), 0)
    end = tl.sum(tl.where(is_mine, group_ends, 0), 0)
    rows = start + tl.arange(0, ROWS)
    is_row = rows < end
    pair = tl.load(pairs + rows, mask=is_row, other=0)
    if GATHERS:
        source, target = pair // TOP_K, rows
    else:
        source, target = rows, pair
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = columns < num_outputs
    x_rows = x + source.to(tl.int64)[:, None] * x_stride
    weight_rows = weights + (expert.to(tl.int64) * num_outputs + columns[None, :]) * num_inputs
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        left = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        right = tl.load(weight_rows + inputs[:, None], mask=is_input[:, None] & is_column[None, :], other=0.0)
        if WIDENS:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    place = out + target.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
