"""A step being put together: what changes in the ranks' rows, and what is computed.

Changes that found no step (nothing could be computed) stay for the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.block_pool import Block
from kvasir_runtime.kv_cache.kv_cache import BlockCopy, TableWrite
from kvasir_runtime.scheduling.step import Fork, NewSequence, ReturnedTokens, StepPlan


@dataclass(slots=True)
class RowChanges:
    """Differences that the ranks have not been told yet."""

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
        """Tell nothing of a row that was given up in the meantime."""
        self.added = [new for new in self.added if new.row != row]
        self.forks = [fork for fork in self.forks if fork.target_row != row]
        self.table_writes = [write for write in self.table_writes if write[0] != row]
        self.token_writes = [write for write in self.token_writes if write[0] != row]
        self.block_copies = [copy for copy in self.block_copies if copy[0] != row]


@dataclass(slots=True)
class StepDraft:
    budget: int
    """Tokens that may still be computed."""
    decode_rows: NDArray[np.int64]
    decode_starts: NDArray[np.int64]
    decode_lengths: NDArray[np.int64]
    """One token each, and drafts."""
    chunk_rows: list[int] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    chunk_lengths: list[int] = field(default_factory=list)
    chunk_samples: list[bool] = field(default_factory=list)
    announced: list[Block] = field(default_factory=list)
    """Blocks that became findable because this step writes them."""
    num_proposals: int = 0
    returned: ReturnedTokens | None = None
    has_preempted: bool = False

    @classmethod
    def empty(cls, budget: int) -> "StepDraft":
        nothing = np.empty(0, dtype=np.int64)
        return cls(budget, nothing, nothing, nothing)

    @property
    def is_empty(self) -> bool:
        return not len(self.decode_rows) and not self.chunk_rows

    def set_decodes(self, rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self.budget -= int(lengths.sum())
        self.decode_rows, self.decode_starts, self.decode_lengths = rows, starts, lengths

    def add_chunk(self, row: int, start: int, length: int, blocks: list[Block], *, samples: bool) -> None:
        self.budget -= length
        self.announced += blocks
        self.chunk_rows.append(row)
        self.chunk_starts.append(start)
        self.chunk_lengths.append(length)
        self.chunk_samples.append(samples)

    def drop(self, row: int) -> None:
        """Compute nothing of a sequence that was preempted: of its decode, for no chunk is there yet, since every
        sequence is preempted only by one that comes before it."""
        self.has_preempted = True
        kept = self.decode_rows != row
        self.decode_rows, self.decode_starts = self.decode_rows[kept], self.decode_starts[kept]
        self.decode_lengths = self.decode_lengths[kept]
        assert row not in self.chunk_rows

    def plan(self, number: int, changes: RowChanges, num_failures: int) -> StepPlan:
        num_decodes = len(self.decode_rows)
        samples = np.empty(num_decodes + len(self.chunk_rows), dtype=np.bool_)
        samples[:num_decodes], samples[num_decodes:] = True, self.chunk_samples
        return StepPlan(
            number=number,
            added=tuple(changes.added),
            forks=tuple(changes.forks),
            table_writes=_int32(changes.table_writes, 4),
            token_writes=_int32(changes.token_writes, 3),
            block_copies=_int32([copy[1:] for copy in changes.block_copies], 2),
            rows=_joined(self.decode_rows, self.chunk_rows),
            num_decodes=num_decodes,
            num_new_tokens=_joined(self.decode_lengths, self.chunk_lengths),
            starts=_joined(self.decode_starts, self.chunk_starts),
            samples=samples,
            num_proposals=self.num_proposals,
            returned=self.returned,
            num_failures=num_failures,
        )


def _joined(decodes: NDArray[np.int64], chunks: list[int]) -> NDArray[np.int32]:
    if not chunks:
        return decodes.astype(np.int32)
    return np.concatenate((decodes, chunks)).astype(np.int32)


def _int32(values: Sequence[tuple[int, ...]], width: int) -> NDArray[np.int32]:
    if not values:
        return np.empty((0, width), dtype=np.int32)
    return np.fromiter(chain.from_iterable(values), np.int32).reshape(-1, width)
