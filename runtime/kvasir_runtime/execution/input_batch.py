"""What a rank remembers of the requests in flight: one row each of tokens and block table, changed by differences only.

`RequestRows.apply` takes a batch's news, `step_inputs` lays the step's tokens end to end. Everything is a preallocated
array, so that building a step costs a handful of vectorised operations whatever the number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.execution.sampling_rows import SamplingRows
from kvasir_runtime.scheduling.batch import NewRequest, ScheduledBatch, ScheduledRequest

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tokens, request after request, in the batch's order."""

    rows: Int64Array  # [num_requests]
    token_ids: Int64Array  # [num_tokens]
    positions: Int64Array  # [num_tokens]
    slots: Int64Array  # [num_tokens]
    query_starts: Int32Array  # [num_requests + 1]
    seq_lens: Int32Array  # [num_requests]
    block_table: Int32Array  # [num_requests, max_blocks]
    samples: NDArray[np.bool_]  # [num_requests]
    max_query_len: int
    max_seq_len: int


class RequestRows:
    """Rows of at most `max_num_seqs` requests; a row's number stays the same while its request is known."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        # The token after the last allowed one may be sampled in a step that was planned ahead, hence + 1.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        self._num_blocks = [0] * max_num_seqs
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, batch: ScheduledBatch) -> None:
        """Forget released requests, take in new ones, and append the blocks given to each."""
        for request_id in batch.released_request_ids:
            self.forget(request_id)
        for new in batch.new_requests:
            self._add(new)
        for share in batch.requests:
            if share.new_block_ids:
                self._append_blocks(self._row_of[share.request_id], share.new_block_ids)

    def forget(self, request_id: str) -> None:
        """Free the request's row; unknown ids were released before any step computed them."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self.sampling.forget(row)
            self._free.append(row)

    def step_inputs(self, requests: Sequence[ScheduledRequest]) -> StepInputs:
        """Inputs of a step over requests whose news have been applied."""
        num = len(requests)
        row_of = self._row_of
        rows = np.fromiter((row_of[request.request_id] for request in requests), np.int64, num)
        first = np.fromiter((request.num_computed_tokens for request in requests), np.int64, num)
        lengths = np.fromiter((request.num_new_tokens for request in requests), np.int64, num)
        query_starts = np.zeros(num + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        token_rows, positions = self._tokens_of(rows, first, lengths, query_starts)
        blocks = self.block_table[token_rows, positions // self.block_size].astype(np.int64)
        seq_lens = (first + lengths).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        return StepInputs(
            rows=rows,
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=blocks * self.block_size + positions % self.block_size,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_table=self.block_table[rows, : -(-max_seq_len // self.block_size)],
            samples=np.fromiter((request.samples for request in requests), np.bool_, num),
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
        )

    def store_sampled(self, rows: Int64Array, positions: Int64Array, token_ids: Int64Array) -> None:
        """Keep tokens sampled for `positions`: later steps may compute them before the scheduler has seen them."""
        self.token_ids[rows, positions] = token_ids

    def _tokens_of(
        self, rows: Int64Array, first: Int64Array, lengths: Int64Array, query_starts: Int32Array
    ) -> tuple[Int64Array, Int64Array]:
        """(row, position) of every token of the step."""
        num_tokens = int(query_starts[-1])
        if num_tokens == len(rows):
            return rows, first  # only decodes
        positions = np.arange(num_tokens) + np.repeat(first - query_starts[:-1], lengths)
        return np.repeat(rows, lengths), positions

    def _add(self, new: NewRequest) -> None:
        row = self._row_of[new.request_id] = self._free.pop()
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self._num_blocks[row] = 0
        self.sampling.add(row, new.sampling)

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        end = self._num_blocks[row] = start + len(block_ids)
        self.block_table[row, start:end] = block_ids
