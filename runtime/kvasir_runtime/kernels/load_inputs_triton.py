"""A decode step's inputs into a graph's, in one Triton kernel (and one for each further KV group); the torch twin is
`load_inputs_reference`."""

import triton
import triton.language as tl

from kvasir_runtime.kernels.load_inputs import DecodeTensors

_BLOCK = 256


def triton_load_inputs(step: DecodeTensors, graph: DecodeTensors) -> None:
    """As `load_inputs_reference`."""
    num_blocks = triton.cdiv(max(graph.num_tokens, graph.num_requests + 1), _BLOCK)
    for group, (slots, graph_slots) in enumerate(zip(step.slots, graph.slots, strict=True)):
        _load_inputs_kernel[(num_blocks,)](
            graph.token_ids, graph.positions, graph_slots, graph.query_starts, graph.seq_lens, graph.rows,
            graph.num_tokens, graph.num_requests,
            step.token_ids, step.positions, slots, step.query_starts, step.seq_lens, step.rows,
            step.num_tokens, step.num_requests, IS_FIRST=group == 0, MAY_DIFFER=graph.may_differ, BLOCK=_BLOCK,
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
