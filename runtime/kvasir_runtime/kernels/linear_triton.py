"""A linear layer in Triton for `--batch-invariant`: tiles of one shape and one order of summation over the inputs.

cuBLAS chooses another kernel for another number of rows, which sums in another order. Here a row's result depends on
nothing but the row. The torch twin is `PlainWeight`.
"""

import torch
import triton
import triton.language as tl

ROWS, OUTPUTS, INPUTS = 64, 64, 64
"""Of every program's tile, however many rows there are."""


class TritonWeight:
    """As torch keeps it."""

    name = "triton"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_outputs, num_inputs = self._weight.shape
        rows = x.reshape(-1, num_inputs)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = x.new_empty((len(rows), num_outputs))
        if len(rows) > 0:
            grid = (triton.cdiv(num_outputs, OUTPUTS), triton.cdiv(len(rows), ROWS))
            _linear_kernel[grid](
                rows, rows.stride(0), self._weight, self._bias, out, len(rows), num_outputs, num_inputs,
                HAS_BIAS=self._bias is not None, ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
                WIDENS=x.device.type == "cpu",  # the interpreter has no bf16 dots
                num_warps=4,
            )  # fmt: skip
        return out.view(*x.shape[:-1], num_outputs)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight[token_ids]


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all
def _linear_kernel(
    x, x_stride, weight, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, tile of rows)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = rows < num_rows, columns < num_outputs
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + columns.to(tl.int64)[None, :] * num_inputs
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        left = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        right = tl.load(weight_rows + inputs[:, None], mask=is_input[:, None] & is_column[None, :], other=0.0)
        if WIDENS:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
