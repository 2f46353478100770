"""A step's inputs from the rows, in one Triton kernel; the torch twin is `prepare_inputs_reference`.

Shapes stay as planned: a draft that is missing is computed as token 0, so that a CUDA graph can hold the launch.
"""

import triton
import triton.language as tl

from kvasir_runtime.kernels.prepare_inputs import InputBuffers, PlannedTokens, RowTensors

_BLOCK = 256


def triton_prepare_inputs(state: RowTensors, planned: PlannedTokens, block_size: int, out: InputBuffers) -> None:
    """As `prepare_inputs_reference` with `drops_missing_drafts` off."""
    num_requests = planned.rows.shape[0]
    num_groups, num_rows, max_blocks = state.block_tables.shape
    _prepare_inputs_kernel[(num_requests, triton.cdiv(planned.max_query_len, _BLOCK))](
        out.token_ids, out.positions, out.slots, out.slots.stride(0), out.query_starts, out.seq_lens,
        state.token_ids, state.token_ids.stride(0), state.num_computed, state.drafts, state.drafts.stride(0),
        state.block_tables, num_rows * max_blocks, max_blocks, planned.rows, planned.query_starts,
        planned.num_decodes, num_groups, block_size, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_decodes"])
def _prepare_inputs_kernel(
    token_ids, positions, slots, slot_group_stride, query_starts, seq_lens,
    known_ids, known_stride, num_computed, drafts, drafts_stride, block_tables, table_group_stride, table_stride,
    rows, planned_starts, num_decodes, num_groups, block_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, block of its tokens)."""
    request = tl.program_id(0)
    row = tl.load(rows + request).to(tl.int64)
    start, end = tl.load(planned_starts + request), tl.load(planned_starts + request + 1)
    first = tl.load(num_computed + row)
    if tl.program_id(1) == 0:
        tl.store(query_starts + request, start)
        tl.store(seq_lens + request, first + end - start)
        if request == tl.num_programs(0) - 1:
            tl.store(query_starts + request + 1, end)

    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < end - start
    first_draft = tl.where(request < num_decodes, 1, end - start)
    position = first + offset
    place = known_ids + row * known_stride + position
    token_id = tl.load(place, mask=inside & (offset < first_draft), other=0)
    draft = tl.load(drafts + row * drafts_stride + offset - 1, mask=inside & (offset >= first_draft), other=0)
    token_id = tl.maximum(tl.where(offset < first_draft, token_id, draft), 0)
    tl.store(token_ids + start + offset, token_id.to(tl.int64), mask=inside)
    tl.store(positions + start + offset, position.to(tl.int64), mask=inside)
    for group in range(num_groups):
        table = block_tables + group * table_group_stride + row * table_stride
        block = tl.load(table + position // block_size, mask=inside, other=0).to(tl.int64)
        slot = block * block_size + position % block_size
        tl.store(slots + group * slot_group_stride + start + offset, slot, mask=inside)
