"""The sequences that run: their rows and blocks, and the changes of both that the ranks have yet to be told.

It knows how a sequence starts, grows, forks and stops, and nothing of queues or policies.
"""

from bisect import insort
from collections.abc import Sequence as Series
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.kv_cache import KvCache, TableWrite
from kvasir_runtime.scheduling.limits import DraftDepth, Rows, SchedulerLimits
from kvasir_runtime.scheduling.request import Sequence, Status
from kvasir_runtime.scheduling.running_rows import RunningRows
from kvasir_runtime.scheduling.step import Fork
from kvasir_runtime.scheduling.step_draft import RowChanges, StepDraft


class RunningSet:
    def __init__(self, limits: SchedulerLimits, kv: KvCache, depth: DraftDepth | None) -> None:
        self.rows = RunningRows(
            limits.max_num_seqs,
            limits.max_model_len,
            num_stages=limits.num_stages,
            max_drafts=0 if depth is None else depth.max_depth,
        )
        self.kv = kv
        self.sequences: list[Sequence] = []
        """By rank."""
        self.prefilling: list[Sequence] = []
        """Those whose prompts are not computed, by rank."""
        self.parents: list[Sequence] = []
        """Those with heirs."""
        self.changes = RowChanges()
        self.draft: StepDraft | None = None
        """The step being put together."""
        self._depth = depth
        self._rows_by_rank: Rows | None = None  # None: to be made anew

    def rows_by_rank(self) -> Rows:
        if self._rows_by_rank is None:
            self._rows_by_rank = np.array([sequence.row for sequence in self.sequences], dtype=np.int64)
        return self._rows_by_rank

    def start(
        self, sequence: Sequence, token_ids: Series[int] | NDArray[np.int32], num_computed: int, row: int
    ) -> None:
        """Let a sequence run in a row that was taken for it."""
        self.rows.occupy(row, sequence, token_ids, num_computed)
        sequence.status = Status.RUNNING
        insort(self.sequences, sequence, key=attrgetter("rank"))
        self._rows_by_rank = None
        if sequence.heirs:
            self.parents.append(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens. The caller has made sure that the pages are free."""
        has_grown = self.try_grow(sequence, num_tokens)
        assert has_grown, f"no pages for {num_tokens} tokens of row {sequence.row}"

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """The same where the pages are free; whether they were, else nothing has changed."""
        row, blocks = sequence.row, sequence.blocks
        writes = self.kv.grow(blocks, num_tokens)
        if writes is None:
            return False
        self.changes.write_tables(row, writes)
        self.rows.capacity[row] = blocks.capacity
        return True

    def untold_writes(self, parent: Sequence, num_tokens: int) -> list[TableWrite]:
        """Of the blocks that forks of its first `num_tokens` tokens share, those that the ranks do not know of yet."""
        return self.changes.table_writes_of(parent.row, num_tokens // self.kv.block_size)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int, row: int, untold: list[TableWrite]) -> None:
        """Let the child run from the parent's first `num_tokens` computed tokens and those known after them; `untold`:
        its `untold_writes`, the same for all children."""
        child.blocks, writes, copies = self.kv.fork(parent.blocks, num_tokens)
        child.was_admitted = True
        self.start(child, self.rows.known(parent.row), num_tokens, row)
        sampling = msgspec.structs.replace(child.sampling, prompt_logprobs=None)
        self.changes.forks.append(Fork(parent.row, row, sampling))
        self.changes.write_tables(row, [*untold, *writes])
        self.changes.copy_blocks(row, copies)

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """Take a sequence's blocks and row away. Those that were to be forked from it, which the ranks have not done
        yet and now cannot."""
        row = sequence.row
        orphans = [self.rows.sequences[target] for target in self.changes.forks_from(row)]
        self.sequences.remove(sequence)
        self._rows_by_rank = None
        for some in (self.prefilling, self.parents):
            if sequence in some:
                some.remove(sequence)
        self.kv.release(sequence.blocks)
        self.rows.vacate(row)
        self.changes.drop(row)
        if self.draft is not None:
            self.draft.drop(row)
        if self._depth is not None:
            self._depth.forget(row)
        return [orphan for orphan in orphans if orphan is not None]
