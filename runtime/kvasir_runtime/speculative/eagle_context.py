"""Which entries of a sequence an EAGLE layer attends to: all of them, or those since it was shown the sequence again.

A hole of a few entries is attended to like the rest: what it holds is the entries of a former sequence, a small part of
all. Behind a larger hole the context begins anew, at the start of a block: the layer is given the rest of the block
table. Within that block, which is the sequence's own, what is missing becomes zero.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import GroupInputs, LayerCache, StepInputs
from kvasir_runtime.speculative.proposer import VerifiedStep
from kvasir_runtime.speculative.slot_contents import SlotContents, slots_of

MOST_FOREIGN = 1 / 8
"""Of a context's entries, those that may be of other sequences."""
MOST_LOOKED_AT = 1 << 20
"""Entries looked at in one go, since that takes several tensors of as many numbers: of sequences as long as the longest
so many, but one at least."""


class EagleContext:
    def __init__(
        self,
        cache: LayerCache,
        max_num_seqs: int,
        *,
        always_cuts: bool,
        agree: Callable[[Tensor], Tensor],
        most_looked_at: int = MOST_LOOKED_AT,
    ) -> None:
        """`always_cuts`: what the host knows of a step decides nothing, so that a graph may hold the cut. `agree` as of
        `ProposerSetup`."""
        self._cache = cache
        self._agree = agree
        self._most_looked_at = most_looked_at
        self._contents = SlotContents(cache)
        self._first_blocks = torch.zeros(max_num_seqs, dtype=torch.int64, device=cache.key.device)
        self._always_cuts = always_cuts
        self._cut_rows: set[int] = set()
        self._is_cut = always_cuts
        """Whether some sequence of the step may have a context that begins later than it does."""

    @property
    def may_be_captured(self) -> bool:
        """Whether the next pass is as all others: what a graph decides on the host, it decides once."""
        return self._always_cuts or not self._is_cut

    def note(self, inputs: StepInputs) -> None:
        """Entries of these positions are made; `token_ids` are those after them."""
        self._contents.note(inputs.groups[self._cache.group].slots, inputs.positions, inputs.token_ids)

    def cut(self, inputs: StepInputs) -> StepInputs:
        """The inputs with each sequence's context where it begins."""
        if not self._is_cut:
            return inputs
        rows, number = inputs.rows.long(), self._cache.group
        group, first = inputs.groups[number], self._first_blocks[rows]
        last = group.block_table.shape[1] - 1
        blocks = (first.unsqueeze(1) + torch.arange(last + 1, device=first.device)).clamp_(max=last)
        table = group.block_table[rows].gather(1, blocks)
        groups = list(inputs.groups)
        groups[number] = GroupInputs(table, group.slots)
        return replace(
            inputs,
            seq_lens=(inputs.seq_lens - first * self._contents.block_size).clamp_(min=0).int(),  # 0 of padding
            rows=torch.arange(len(rows), dtype=torch.int32, device=first.device),
            groups=tuple(groups),
        )

    def begin_step(self, step: VerifiedStep) -> None:
        """Settle where contexts begin. Waits for the device where the layer was not shown a sequence's last step."""
        self._contents.copy_blocks(step.block_copies)
        if step.batch.is_resumed.any():
            self._resume(step)
        self._is_cut = self._always_cuts or not self._cut_rows.isdisjoint(step.batch.rows.tolist())

    def _resume(self, step: VerifiedStep) -> None:
        inputs = step.inputs
        requests = torch.from_numpy(step.batch.is_resumed.nonzero()[0]).to(inputs.rows.device)
        rows, starts = inputs.rows[requests].long(), inputs.positions[inputs.query_starts[requests].long()]
        first_blocks = self._agree(self._settle_all(step, rows, starts))
        self._first_blocks[rows] = first_blocks
        if self._always_cuts:
            return
        self._cut_rows -= set(step.batch.resumed_rows.tolist())
        self._cut_rows |= set(step.batch.resumed_rows[first_blocks.cpu().numpy() > 0].tolist())

    def _settle_all(self, step: VerifiedStep, rows: Tensor, starts: Tensor) -> Tensor:
        """As `_settle`, some sequences at a time, the short ones together."""
        first_blocks, num_rows = torch.zeros_like(starts), max(1, self._most_looked_at // max(1, int(starts.max())))
        for part in torch.split(starts.argsort(), num_rows):
            first_blocks[part] = self._settle(step, rows[part], starts[part])
        return first_blocks

    def _settle(self, step: VerifiedStep, rows: Tensor, starts: Tensor) -> Tensor:
        """The first block [n] of the context of sequences whose entries are made from the positions `starts` [n] on;
        what is missing in the block that these begin in becomes zero."""
        group, block_size = step.inputs.groups[self._cache.group], self._contents.block_size
        longest = int(starts.max())
        if not longest:
            return starts
        positions = torch.arange(longest, device=rows.device).expand(len(rows), -1)
        is_own, is_there = self._contents.held(group, rows, positions, step.token_ids[rows, 1 : longest + 1].long())
        is_wrong = ~is_own & (positions < starts.unsqueeze(1))
        last_block = (starts // block_size * block_size).unsqueeze(1)
        self._blank(slots_of(group, rows, positions, block_size)[is_wrong & (positions >= last_block)])
        is_wrong &= positions < last_block
        has_many = is_wrong.sum(1) > MOST_FOREIGN * starts
        is_unusable = is_wrong & (~is_there | has_many.unsqueeze(1))
        return -(-torch.where(is_unusable, positions + 1, 0).amax(1) // block_size)

    def _blank(self, slots: Tensor) -> None:
        block, offset = slots // self._contents.block_size, slots % self._contents.block_size
        self._cache.key[block, offset] = 0
        self._cache.value[block, offset] = 0
