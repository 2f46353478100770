"""A step's inputs: from the rows on the device and the plan to the tokens that the decoder computes, in one call a
step; and those of a decode step into the tensors that a graph was captured with.

The rows, not the plan, say where a request's tokens start: steps under way may still decide how many drafts hold. A
decode computes its last known token and its drafts, a prefill chunk the next known tokens.
"""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """What the host knows of a step's shape: enough to size grids and buffers without asking the device.

    `query_lens` are exact; `max_seq_len` is a bound, since a step under way decides how many drafts hold.
    """

    query_lens: NDArray[np.int32]  # [num_requests], the decodes first
    num_decodes: int
    """Requests with one token and perhaps drafts; the rest are prefill chunks."""
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def max_query_len(self) -> int:
        return int(self.query_lens.max())


@dataclass(frozen=True, slots=True)
class RowTensors:
    """What is read of the rows; all contiguous."""

    token_ids: Tensor  # int32 [num_rows, max_model_len + 1]
    num_computed: Tensor  # int32 [num_rows], where a request's tokens start
    drafts: Tensor  # int32 [num_rows, max_drafts]; -1 from where there is none
    block_tables: Tensor  # int32 [num_groups, num_rows, max_blocks]


@dataclass(frozen=True, slots=True)
class PlannedTokens:
    """The step as planned, request after request, the decodes first."""

    rows: Tensor  # int32 [num_requests]
    query_starts: Tensor  # int32 [num_requests + 1]
    num_decodes: int
    num_tokens: int
    max_query_len: int


@dataclass(frozen=True, slots=True)
class InputBuffers:
    """Where the step's inputs are written, from the front; what lies behind the step's tokens is left as it was."""

    token_ids: Tensor  # int64 [max_tokens]
    positions: Tensor  # int64 [max_tokens]
    slots: Tensor  # int64 [num_groups, max_tokens]; block_id * block_size + offset
    query_starts: Tensor  # int32 [max_requests + 1]
    seq_lens: Tensor  # int32 [max_requests], positions before the end of the request's tokens


PrepareInputs = Callable[[RowTensors, PlannedTokens, int, InputBuffers], None]


def prepare_inputs_reference(
    state: RowTensors, planned: PlannedTokens, block_size: int, out: InputBuffers, *, drops_missing_drafts: bool
) -> None:
    """Write the step's inputs to `out`.

    A draft that is planned but -1 is left out with all after it where `drops_missing_drafts` (CPU: fewer tokens are
    computed than planned, and `out.query_starts` says how many), else computed as token 0 (CUDA: shapes stay).
    """
    rows = planned.rows.long()
    lengths = planned.query_starts.diff().long()
    if drops_missing_drafts:
        lengths = _without_missing_drafts(state.drafts, rows, lengths, planned.num_decodes)
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    first = state.num_computed[rows].long()
    request = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    offsets = torch.arange(len(request), device=rows.device) - starts[request]
    positions = first[request] + offsets
    token_rows, num_tokens = rows[request], len(request)
    token_ids = state.token_ids[token_rows, positions.clamp(max=state.token_ids.shape[1] - 1)]
    if state.drafts.shape[1]:
        drafts = state.drafts[token_rows, (offsets - 1).clamp(0, state.drafts.shape[1] - 1)].clamp(min=0)
        token_ids = torch.where((request < planned.num_decodes) & (offsets > 0), drafts, token_ids)
    out.token_ids[:num_tokens] = token_ids
    out.positions[:num_tokens] = positions
    blocks = state.block_tables[:, token_rows, positions // block_size].long()
    out.slots[:, :num_tokens] = blocks * block_size + positions % block_size
    out.query_starts[: len(starts)] = starts
    out.seq_lens[: len(rows)] = first + lengths


def cpu_prepare_inputs(library: CDLL) -> PrepareInputs:
    """The compiled form; it leaves missing drafts out."""
    native = library.kvasir_prepare_inputs

    def prepare_inputs(state: RowTensors, planned: PlannedTokens, block_size: int, out: InputBuffers) -> None:
        num_groups, num_rows, max_blocks = state.block_tables.shape
        native(
            state.token_ids.data_ptr(),
            state.token_ids.shape[1],
            state.num_computed.data_ptr(),
            state.drafts.data_ptr(),
            state.drafts.shape[1],
            state.block_tables.data_ptr(),
            num_groups,
            num_rows,
            max_blocks,
            planned.rows.data_ptr(),
            planned.query_starts.data_ptr(),
            len(planned.rows),
            planned.num_decodes,
            block_size,
            out.token_ids.data_ptr(),
            out.positions.data_ptr(),
            out.slots.data_ptr(),
            out.slots.shape[1],
            out.query_starts.data_ptr(),
            out.seq_lens.data_ptr(),
        )

    return prepare_inputs


def _without_missing_drafts(drafts: Tensor, rows: Tensor, lengths: Tensor, num_decodes: int) -> Tensor:
    """Lengths with those of the decodes cut to the drafts that are there."""
    num_drafts = (drafts[rows[:num_decodes]] >= 0).cumprod(dim=1).sum(dim=1)
    decodes = torch.minimum(lengths[:num_decodes], 1 + num_drafts)
    return torch.cat((decodes, lengths[num_decodes:]))


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """All contiguous."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: tuple[Tensor, ...]  # of each KV group int64 [num_tokens]; -1: not written
    query_starts: Tensor  # int32 [num_requests + 1]
    seq_lens: Tensor  # int32 [num_requests]; 0: reads nothing
    rows: Tensor  # int32 [num_requests]


LoadInputs = Callable[[DecodeTensors, DecodeTensors], None]


def load_inputs_reference(step: DecodeTensors, graph: DecodeTensors) -> None:
    """Copy a step of no more requests and tokens to the front of a graph's."""
    num_requests, num_tokens = step.seq_lens.shape[0], step.token_ids.shape[0]
    most_requests, most_tokens = graph.seq_lens.shape[0], graph.token_ids.shape[0]
    graph.token_ids[:num_tokens].copy_(step.token_ids)
    graph.positions[:num_tokens].copy_(step.positions)
    graph.seq_lens[:num_requests].copy_(step.seq_lens)
    graph.rows[:num_requests].copy_(step.rows)
    for slots, own in zip(step.slots, graph.slots, strict=True):
        own[:num_tokens].copy_(slots)
        if num_tokens < most_tokens:
            own[num_tokens:].fill_(-1)
    if num_requests < most_requests:
        graph.seq_lens[num_requests:].zero_()
    if most_tokens > most_requests:  # which may have different numbers of them
        graph.query_starts[: num_requests + 1].copy_(step.query_starts)
        graph.query_starts[num_requests + 1 :].fill_(num_tokens)
