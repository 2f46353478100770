"""What the scheduler knows of running sequences, one row of arrays each, and what of it the ranks have yet to hear.

Planning and updating hundreds of decodes is a handful of numpy operations instead of a loop (benchmarks/scheduler.py).

Four counts of a row change together, and only here. `num_known` tokens and `num_written` KV entries are facts, from
results. `most_known` and `most_planned` are the highest values that they can have once all steps under way have ended:
a step with drafts brings one token at least and 1 + drafts at most.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.kv_cache import BlockCopy, TableWrite
from kvasir_runtime.requests.outputs import PlainTokens
from kvasir_runtime.scheduling.request import Sequence
from kvasir_runtime.scheduling.step import Fork, NewSequence, ReturnedTokens, Rows

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Lines = NDArray[np.intp] | slice
NO_TOKEN = -1


def where(mask: NDArray[np.bool_]) -> Lines:
    """Indices of the lines for which it is true; a slice where that is all, by which nothing is copied."""
    return slice(None) if np.count_nonzero(mask) == len(mask) else mask.nonzero()[0]


@dataclass(slots=True)
class PendingUpdates:
    """Changes of rows for the ranks, which go out with the next step that is planned."""

    added: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    table_writes: list[tuple[int, int, int, int]] = field(default_factory=list)
    token_writes: list[tuple[int, int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)
    """The row whose block is copied to, then source and target."""

    def write_tables(self, row: int, writes: list[TableWrite]) -> None:
        for group, index, block in writes:
            self.table_writes.append((row, group, index, block))

    def copy_blocks(self, row: int, copies: list[BlockCopy]) -> None:
        """From the row that it is forked from. Each of the two holds its blocks until a step is planned, else the copy
        is dropped: it would come after whoever has the blocks next."""
        self.block_copies += [(row, *copy) for copy in copies]

    def table_writes_of(self, row: int, num_blocks: int) -> list[TableWrite]:
        """Those of its first blocks, which a copy of the row lacks: the ranks fork rows before they write tables."""
        return [
            (group, index, block)
            for of_row, group, index, block in self.table_writes
            if of_row == row and index < num_blocks
        ]

    def forks_from(self, row: int) -> list[int]:
        """Rows that are to become copies of this one."""
        return [fork.target_row for fork in self.forks if fork.source_row == row]

    def drop(self, row: int) -> None:
        """Send nothing about a row that was given up in the meantime."""
        self.added = [new for new in self.added if new.row != row]
        self.forks = [fork for fork in self.forks if fork.target_row != row]
        self.table_writes = [write for write in self.table_writes if write[0] != row]
        self.token_writes = [write for write in self.token_writes if write[0] != row]
        self.block_copies = [copy for copy in self.block_copies if copy[0] != row]


class DrawnTokens(msgspec.Struct, frozen=True, eq=False):
    """Tokens drawn for some rows: one line each, of which the first `num_accepted` follow each other."""

    rows: Rows  # [n]
    token_ids: Int32Array  # [n, most]
    num_accepted: Int32Array  # [n], 0 where the core chooses
    max_tokens_in_flight: Int64Array  # [n], what planning counted with


class KeptTokens(msgspec.Struct, frozen=True, eq=False):
    """What of them counts, after stop tokens and lengths were looked at."""

    drawn: DrawnTokens
    num_kept: Int64Array  # [n]
    is_stop: NDArray[np.bool_]  # [n], ends at a stop token
    is_full: NDArray[np.bool_]  # [n], ends at the sequence's last token

    @property
    def has_ended(self) -> NDArray[np.bool_]:
        return self.is_stop | self.is_full


class RunningRows:
    def __init__(self, num_rows: int, max_model_len: int, *, num_stages: int = 1, max_drafts: int = 0) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_known = np.zeros(num_rows, dtype=np.int64)
        self.num_written = np.zeros(num_rows, dtype=np.int64)
        self.most_known = np.zeros(num_rows, dtype=np.int64)
        self.most_planned = np.zeros(num_rows, dtype=np.int64)
        self.capacity = np.zeros(num_rows, dtype=np.int64)
        """Tokens that fit into the sequence's blocks; 0 of a free row."""
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
        self.draws = np.zeros(num_rows, dtype=np.bool_)
        """Whether the rank draws its tokens; else the core chooses them, and there are no drafts."""
        self.waits_for_result = np.zeros(num_rows, dtype=np.bool_)
        """Whether a step may be planned only after the one before has ended: where the core chooses tokens, and
        everywhere where there are pipeline stages."""
        self.is_awaited = np.zeros(num_rows, dtype=np.bool_)
        """Of those: whether a step under way samples after it."""
        self.num_that_wait = 0
        """Rows that wait for results."""
        self.num_ready_drafts = np.zeros(num_rows, dtype=np.int64)
        """Drafts that the rank holds for the next step."""
        self.num_returned = np.zeros(num_rows, dtype=np.int64)
        """Known tokens that the stages before the last have, or will have by pending updates."""
        self.drafts = np.full((num_rows, max_drafts if num_stages > 1 else 0), NO_TOKEN, dtype=np.int32)
        """What the last stage holds for the next step, for the stages before it."""
        self.generation = np.zeros(num_rows, dtype=np.int64)
        """Counts the row's occupants, so that results for a former one are told from the present one's."""
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.pending = PendingUpdates()
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
        min_tokens = 0 if request.spec.grammar is not None else sampling.min_tokens  # else its mask sees to them
        self.first_stop[row] = request.num_prompt_tokens + min_tokens + 1
        self._set_stop_ids(row, sampling.stop_token_ids)
        self.request_ids[row], self.indices[row] = request.request_id, sequence.index
        self.api_index[row] = request.api_index
        self.tenant[row] = request.tenant_number
        self.draws[row] = request.group is None
        self.waits_for_result[row] = waits = self._has_stages or request.group is not None
        self.num_that_wait += waits
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
        """Free the row; what the ranks have not heard of it they never will."""
        self.pending.drop(row)
        self.sequences[row] = None
        self.capacity[row] = 0
        self.num_that_wait -= int(self.waits_for_result[row])
        self._drop_stop_ids(row)
        self.generation[row] += 1
        self._free.append(row)

    def known(self, row: int) -> Int32Array:
        """Tokens known, a view."""
        return self.token_ids[row, : self.num_known[row]]

    def take_pending(self) -> PendingUpdates:
        """For a plan, or to forget them when every row is given up."""
        pending, self.pending = self.pending, PendingUpdates()
        return pending

    def plan_decodes(self, rows: Rows, most_known: Int64Array, num_drafts: Int64Array) -> None:
        """A step computes the last token of each, which is the `most_known`-th at most, and drafts after it."""
        most_planned = most_known + num_drafts
        self.most_planned[rows] = most_planned
        self.most_known[rows] = most_planned + 1
        if self.num_that_wait:
            self.is_awaited[rows] = self.waits_for_result[rows]

    def plan_chunk(self, row: int, end: int) -> bool:
        """A step computes a prompt up to `end`; whether it samples after it. Nothing follows what is full already."""
        samples = bool(end == self.most_known[row] < self.max_total[row])
        self.most_planned[row] = end
        self.most_known[row] += samples
        self.is_awaited[row] = samples and self.waits_for_result[row]
        return samples

    def is_prefilled(self, row: int, end: int) -> bool:
        """Whether a prompt that is planned up to `end` has no chunk left: a last token alone is computed like a
        decode's, if it is decoded after."""
        known = self.num_known[row]
        return bool(end == known or (end == known - 1 and known < self.max_total[row]))

    def wrote_chunk(self, row: int, end: int) -> None:
        """Such a step has ended."""
        self.num_written[row] = end

    def keep(self, drawn: DrawnTokens) -> KeptTokens:
        """Append drawn tokens to their rows up to the first that ends the sequence, and settle the rows' counts."""
        rows = drawn.rows
        known = self.num_known[rows]
        num_kept, is_stop = self._cut_at_stop(drawn, known)
        is_kept = num_kept > 0
        for column in range(drawn.token_ids.shape[1]):
            lines = where(num_kept > column)
            self.token_ids[rows[lines], known[lines] + column] = drawn.token_ids[lines, column]
        known = known + num_kept
        self.num_known[rows] = known
        self.num_written[rows] = known - is_kept
        most_known = self.most_known[rows] - (drawn.max_tokens_in_flight - drawn.num_accepted)
        self.most_known[rows] = most_known
        self.most_planned[rows] = most_known - is_kept  # where the core chooses, it goes on when it gets its token
        return KeptTokens(drawn, num_kept, is_stop, (known >= self.max_total[rows]) & is_kept)

    def plain_tokens(self, kept: KeptTokens, which: Lines) -> dict[int, PlainTokens]:
        """The outputs of lines `which`, which tell nothing but tokens, by API process."""
        api_indices = self.api_index[kept.drawn.rows[which]]
        if not len(api_indices) or (api_indices == api_indices[0]).all():
            return {int(api_indices[0]): self._columns(kept, which)} if len(api_indices) else {}
        lines = np.arange(len(kept.drawn.rows))[which]
        return {
            api_index: self._columns(kept, lines[api_indices == api_index])
            for api_index in np.unique(api_indices).tolist()
        }

    def append(self, row: int, token_id: int) -> None:
        """A token that the core chose."""
        known = int(self.num_known[row])
        self.token_ids[row, known] = token_id
        self.num_known[row] = self.most_known[row] = self.num_returned[row] = known + 1
        self.num_written[row] = self.most_planned[row] = known
        self.pending.token_writes.append((row, known, token_id))

    def take_returned(self, rows: Rows, lengths: Rows) -> ReturnedTokens:
        """What the stages before the last do not know of these decodes, of so many tokens each; from now on they do."""
        first, last = self.num_returned[rows], self.num_known[rows]
        counts = last - first
        own = np.repeat(rows, counts)
        ends = np.cumsum(counts)
        positions = np.repeat(last - ends, counts) + np.arange(len(own))
        self.num_returned[rows] = last
        writes = np.stack((own, positions, self.token_ids[own, positions]), axis=1).astype(np.int32)
        return ReturnedTokens(writes, self.drafts[rows, : int(lengths.max(initial=1)) - 1])

    def keep_drafts(self, rows: Rows, drafts: Int32Array) -> None:
        """Of the last stage, for when the rows decode next."""
        num_proposals = drafts.shape[1]
        self.drafts[rows, :num_proposals] = drafts
        self.drafts[rows, num_proposals:] = NO_TOKEN

    def _columns(self, kept: KeptTokens, which: Lines) -> PlainTokens:
        rows, num_kept, tokens = kept.drawn.rows[which], kept.num_kept[which], kept.drawn.token_ids[which]
        if tokens.shape[1] > 1:
            tokens = tokens[np.arange(tokens.shape[1]) < num_kept[:, None]]
        return PlainTokens(
            request_ids=self.request_ids[rows].tolist(),
            indices=self.indices[rows].tolist(),
            num_tokens=num_kept.tolist(),
            token_ids=tokens.ravel().tolist(),
        )

    def _cut_at_stop(self, drawn: DrawnTokens, known: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        """(tokens kept, whether the last one is a stop token) of each line."""
        is_equal = drawn.token_ids[:, :, None] == self.stop_ids.take(drawn.rows, 0)[:, None, :]
        if not np.count_nonzero(is_equal):
            return drawn.num_accepted.astype(np.int64), np.zeros(len(known), dtype=np.bool_)
        is_stop = is_equal.any(axis=2)
        column = np.arange(1, drawn.token_ids.shape[1] + 1)
        is_stop &= column <= drawn.num_accepted[:, None]
        is_stop &= known[:, None] + column >= self.first_stop[drawn.rows][:, None]
        has_stop = is_stop.any(axis=1)
        return np.where(has_stop, is_stop.argmax(axis=1) + 1, drawn.num_accepted), has_stop

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
