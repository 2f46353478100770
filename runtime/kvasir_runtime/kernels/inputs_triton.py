"""A step's inputs in Triton; the torch twins are in `inputs`. Each is one kernel (loading: one more for each further KV
group).

Shapes stay as planned: a draft that is missing is computed as token 0, so that a CUDA graph can hold the launch.
"""

import triton
import triton.language as tl

from kvasir_runtime.kernels.inputs import DecodeTensors, InputBuffers, PlannedTokens, RowTensors
from kvasir_runtime.kernels.launches import Launcher

_BLOCK = 256


def triton_prepare_inputs(state: RowTensors, planned: PlannedTokens, block_size: int, out: InputBuffers) -> None:
    """As `prepare_inputs_reference` with `drops_missing_drafts` off."""
    num_requests = planned.rows.shape[0]
    num_groups, num_rows, max_blocks = state.block_tables.shape
    _launch_prepare_inputs(
        (num_requests, triton.cdiv(planned.max_query_len, _BLOCK)),
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


def triton_load_inputs(step: DecodeTensors, graph: DecodeTensors) -> None:
    """As `load_inputs_reference`."""
    num_requests, num_tokens = graph.seq_lens.shape[0], graph.token_ids.shape[0]
    num_blocks = triton.cdiv(max(num_tokens, num_requests + 1), _BLOCK)
    for group, (slots, graph_slots) in enumerate(zip(step.slots, graph.slots, strict=True)):
        _launch_load_inputs(
            (num_blocks,),
            graph.token_ids, graph.positions, graph_slots, graph.query_starts, graph.seq_lens, graph.rows,
            num_tokens, num_requests,
            step.token_ids, step.positions, slots, step.query_starts, step.seq_lens, step.rows,
            step.token_ids.shape[0], step.seq_lens.shape[0], IS_FIRST=group == 0, MAY_DIFFER=num_tokens > num_requests,
            BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["graph_tokens", "graph_requests", "num_tokens", "num_requests"])
def _load_inputs_kernel(
    graph_token_ids, graph_positions, graph_slots, graph_query_starts, graph_seq_lens, graph_rows,
    graph_tokens, graph_requests, token_ids, positions, slots, query_starts, seq_lens, rows, num_tokens, num_requests,
    IS_FIRST: tl.constexpr, MAY_DIFFER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, and of requests)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token, is_request = index < num_tokens, index < num_requests
    tl.store(graph_slots + index, tl.load(slots + index, mask=is_token, other=-1), mask=index < graph_tokens)
    if IS_FIRST:
        tl.store(graph_token_ids + index, tl.load(token_ids + index, mask=is_token, other=0), mask=is_token)
        tl.store(graph_positions + index, tl.load(positions + index, mask=is_token, other=0), mask=is_token)
        tl.store(graph_rows + index, tl.load(rows + index, mask=is_request, other=0), mask=is_request)
        seq_len = tl.load(seq_lens + index, mask=is_request, other=0)
        tl.store(graph_seq_lens + index, seq_len, mask=index < graph_requests)
        if MAY_DIFFER:
            start = tl.load(query_starts + index, mask=index <= num_requests, other=0)
            start = tl.where(index <= num_requests, start, num_tokens)
            tl.store(graph_query_starts + index, start, mask=index <= graph_requests)


_launch_prepare_inputs, _launch_load_inputs = Launcher(_prepare_inputs_kernel), Launcher(_load_inputs_kernel)
