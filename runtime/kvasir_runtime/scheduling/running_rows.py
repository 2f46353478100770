"""What the scheduler knows of running sequences, one row of arrays each: planning and updating hundreds of decodes is a
handful of numpy operations instead of a loop (benchmarks/scheduler.py).

Known, written and planned are counted apart. A row's `num_known` tokens and `num_written` KV entries are facts, from
results. `most_known` and `most_planned` are the highest values that they can have once all steps under way have ended:
a step with drafts brings one token at least and 1 + drafts at most.
"""

from collections.abc import Sequence as Series

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.request import Sequence

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Lines = NDArray[np.intp] | slice
NO_TOKEN = -1


def where(mask: NDArray[np.bool_]) -> Lines:
    """Indices of the lines for which it is true; a slice where that is all, by which nothing is copied."""
    return slice(None) if np.count_nonzero(mask) == len(mask) else mask.nonzero()[0]


class RunningRows:
    def __init__(self, num_rows: int, max_model_len: int, *, num_stages: int = 1, max_drafts: int = 0) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_known = np.zeros(num_rows, dtype=np.int64)
        self.num_written = np.zeros(num_rows, dtype=np.int64)
        self.most_known = np.zeros(num_rows, dtype=np.int64)
        self.most_planned = np.zeros(num_rows, dtype=np.int64)
        self.capacity = np.zeros(num_rows, dtype=np.int64)
        """Tokens that fit into the sequence's blocks."""
        self.next_boundary = np.zeros(num_rows, dtype=np.int64)
        """Written tokens at which another block is full."""
        self.max_total = np.zeros(num_rows, dtype=np.int64)
        self.first_stop = np.zeros(num_rows, dtype=np.int64)
        """Known tokens from which on a stop token ends the sequence."""
        self.stop_ids = np.full((num_rows, 1), NO_TOKEN, dtype=np.int64)
        """As wide as the longest list of those that run: a step compares each drawn token with all columns."""
        self._num_stop_ids = np.zeros(num_rows, dtype=np.int64)
        self.request_ids = np.full(num_rows, None, dtype=object)
        self.indices = np.zeros(num_rows, dtype=np.int64)
        """Of each row's sequence in its request."""
        self.api_index = np.zeros(num_rows, dtype=np.int32)
        self.tenant = np.zeros(num_rows, dtype=np.int32)
        self.is_plain = np.zeros(num_rows, dtype=np.bool_)
        """Whether an output that does not end the sequence is nothing but tokens."""
        self.is_beam = np.zeros(num_rows, dtype=np.bool_)
        """Whether the scheduler chooses its tokens, once all of its search have reported."""
        self.waits_for_result = np.zeros(num_rows, dtype=np.bool_)
        """Whether a step may be planned only after the one before has ended: beams, and all where there are stages."""
        self.is_awaited = np.zeros(num_rows, dtype=np.bool_)
        """Of those: whether a step under way samples after it."""
        self.num_ready_drafts = np.zeros(num_rows, dtype=np.int64)
        """Drafts that the rank holds for the next step."""
        self.num_returned = np.zeros(num_rows, dtype=np.int64)
        """Known tokens that the stages before the last were told of, or will be by changes that wait for a plan."""
        self.drafts = np.full((num_rows, max_drafts if num_stages > 1 else 0), NO_TOKEN, dtype=np.int32)
        """What the last stage holds for the next step, where others have to be told."""
        self.generation = np.zeros(num_rows, dtype=np.int64)
        """Counts the row's occupants, so that results for a former one are told from the present one's."""
        self.sequences: list[Sequence | None] = [None] * num_rows
        self._has_stages = num_stages > 1
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_row(self) -> int:
        return self._free.pop()

    def give_back(self, rows: list[int]) -> None:
        """Rows that were taken, and are not occupied any more; the list is emptied."""
        self._free += rows
        rows.clear()

    def reserve(self, row: int) -> None:
        """Take one particular row that is free."""
        self._free.remove(row)

    def occupy(self, row: int, sequence: Sequence, token_ids: Series[int] | Int32Array, num_computed: int) -> None:
        """Give a row that was taken to the sequence."""
        request, sampling, num_known = sequence.request, sequence.sampling, len(token_ids)
        self.token_ids[row, :num_known] = token_ids
        self.num_known[row] = self.most_known[row] = self.num_returned[row] = num_known
        self.num_written[row] = self.most_planned[row] = num_computed
        self.max_total[row] = request.max_total_tokens
        self.first_stop[row] = request.num_prompt_tokens + sampling.min_tokens + 1
        self._set_stop_ids(row, sampling.stop_token_ids)
        self.request_ids[row], self.indices[row] = request.request_id, sequence.index
        self.api_index[row] = request.api_index
        self.tenant[row] = request.tenant_number
        self.is_beam[row] = request.spec.beam is not None
        self.waits_for_result[row] = self._has_stages or request.spec.beam is not None
        self.is_awaited[row] = False
        self.num_ready_drafts[row] = 0
        self.drafts[row] = NO_TOKEN
        self.generation[row] += 1
        self.sequences[row] = sequence
        sequence.row = row
        self.refresh(sequence)

    def occupant(self, row: int) -> Sequence:
        """Of a row that is occupied."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def refresh(self, sequence: Sequence) -> None:
        """Take over what the sequence's blocks and outputs have become."""
        row, blocks = sequence.row, sequence.blocks
        self.capacity[row] = blocks.capacity
        self.next_boundary[row] = blocks.next_boundary
        self.is_plain[row] = sequence.has_sent_output and sequence.sampling.logprobs is None

    def vacate(self, row: int) -> None:
        self.sequences[row] = None
        self.capacity[row] = 0
        self._drop_stop_ids(row)
        self.generation[row] += 1
        self._free.append(row)

    def append(self, row: int, token_id: int) -> None:
        """A token that the scheduler chose (beams)."""
        known = self.num_known[row]
        self.token_ids[row, known] = token_id
        self.num_known[row] = self.most_known[row] = self.num_returned[row] = known + 1
        self.num_written[row] = self.most_planned[row] = known

    def known(self, row: int) -> Int32Array:
        """Tokens known, a view."""
        return self.token_ids[row, : self.num_known[row]]

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self._num_stop_ids[row] = len(stop_ids)

    def _drop_stop_ids(self, row: int) -> None:
        num_dropped, self._num_stop_ids[row] = self._num_stop_ids[row], 0
        if num_dropped == self.stop_ids.shape[1] > 1:
            self.stop_ids = self.stop_ids[:, : max(1, int(self._num_stop_ids.max()))].copy()
