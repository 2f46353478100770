"""Step inputs for a draft's own forward passes: chosen tokens of chosen rows, over the target's block tables.

A pass writes only where the sequence has blocks (the scheduler gives some ahead where it can): a place behind them gets
no slot, and what is drafted from there on does not count.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import GroupInputs, StepInputs
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.speculative.proposer import VerifiedStep


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The sequences that drafts are made for."""

    tables: tuple[Tensor, ...]  # of each KV group int32 [max_num_seqs, max_blocks]
    rows: Tensor  # int64 [n]
    num_slots: Tensor  # int64 [n], positions that there are blocks for
    block_size: int
    last_position: int
    """Of the context: nothing is known of positions behind it, and a draft that would stand there is never used."""
    max_seq_len: int
    """A bound on tokens, drafts included, that the host knows."""

    def window(self, token_ids: Tensor, first: Tensor, query_lens: NDArray[np.int32]) -> StepInputs:
        """The inputs of `query_lens` [n] tokens a sequence from the positions `first` int64 [n] on; `token_ids` int64
        [num_tokens] lie end to end. On CUDA sending the lengths waits for the device."""
        device = first.device
        lengths = torch.from_numpy(query_lens.astype(np.int64)).to(device)
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int64, device=device)
        starts[1:] = lengths.cumsum(0)
        num_tokens = int(query_lens.sum())
        request = torch.repeat_interleave(lengths, output_size=num_tokens)
        within = torch.arange(num_tokens, device=device) - starts[request]
        positions = (first[request] + within).clamp_(max=self.last_position)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_starts=starts.int(),
            seq_lens=(first + lengths).clamp_(max=self.last_position + 1).int(),
            rows=self.rows.int(),
            groups=self._groups(request, positions),
            lengths=StepLengths(query_lens, len(query_lens) if num_tokens == len(query_lens) else 0, self.max_seq_len),
        )

    def decodes(self, token_ids: Tensor, first: Tensor, query_len: int = 1) -> StepInputs:
        """As `window`, of equally many tokens a sequence: all of it is made on the device."""
        num_sequences, device = len(self.rows), first.device
        offsets = torch.arange(query_len, device=device)
        positions = (first.unsqueeze(1) + offsets).flatten().clamp_(max=self.last_position)
        request = torch.arange(num_sequences, device=device).unsqueeze(1).expand(-1, query_len).flatten()
        query_lens = np.full(num_sequences, query_len, dtype=np.int32)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_starts=torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * query_len,
            seq_lens=(first + query_len).clamp_(max=self.last_position + 1).int(),
            rows=self.rows.int(),
            groups=self._groups(request, positions),
            lengths=StepLengths(query_lens, num_sequences, self.max_seq_len),
        )

    def _groups(self, request: Tensor, positions: Tensor) -> tuple[GroupInputs, ...]:
        has_slot = positions < self.num_slots[request]
        block, offset, rows = positions // self.block_size, positions % self.block_size, self.rows[request]
        slots = (table[rows, block].long() * self.block_size + offset for table in self.tables)
        return tuple(
            GroupInputs(table, torch.where(has_slot, slot, -1)) for table, slot in zip(self.tables, slots, strict=True)
        )


def draft_rows(step: VerifiedStep, block_size: int, most_drafts: int) -> DraftRows:
    """Of the sequences that sampled in a step."""
    inputs = step.inputs
    return DraftRows(
        tables=tuple(group.block_table for group in inputs.groups),
        rows=step.rows,
        num_slots=step.num_slots,
        block_size=block_size,
        last_position=step.token_ids.shape[1] - 2,
        max_seq_len=inputs.lengths.max_seq_len + most_drafts,
    )


def prefill_chunks(inputs: StepInputs) -> StepInputs | None:
    """The step's chunks without its decodes; None: there are none."""
    lengths = inputs.lengths
    num_decodes = lengths.num_decodes
    if num_decodes == len(lengths.query_lens):
        return None
    if num_decodes == 0:
        return inputs
    first = int(lengths.query_lens[:num_decodes].sum())
    return StepInputs(
        token_ids=inputs.token_ids[first:],
        positions=inputs.positions[first:],
        query_starts=inputs.query_starts[num_decodes:] - first,
        seq_lens=inputs.seq_lens[num_decodes:],
        rows=inputs.rows[num_decodes:],
        groups=tuple(GroupInputs(group.block_table, group.slots[first:]) for group in inputs.groups),
        lengths=StepLengths(lengths.query_lens[num_decodes:], 0, lengths.max_seq_len),
    )
