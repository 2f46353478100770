"""What a rank keeps of the sequences in flight: tensors on the device, one row a sequence, changed by differences only.

A row's tokens, lengths and block tables are the truth about its sequence, drafts and tokens of steps under way
included: the scheduler names rows, and hears of the tokens when they have come back. Parameters of sampling are in
`sampling_rows`.
"""

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.execution.sampling_rows import Int32Array, SamplingRows
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.inputs import RowTensors
from kvasir_runtime.scheduling.step import Fork, NewSequence, StepPlan


class Rows:
    """`max_num_seqs` rows; sequences of at most `max_model_len` tokens, and one that was drawn after the last."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        max_drafts: int,
        vocab_size: int,
        transfers: Transfers,
    ) -> None:
        device = transfers.device
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.token_ids = torch.zeros((max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        """What lies behind a row's known tokens has no meaning."""
        self._lengths = torch.zeros((3, max_num_seqs), dtype=torch.int32, device=device)
        self.num_known, self.num_computed, self.num_prompt_tokens = self._lengths
        self.block_tables = torch.zeros((num_groups, max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.drafts = torch.full((max_num_seqs, max_drafts), -1, dtype=torch.int32, device=device)
        """Guesses of the tokens after the known ones; -1 from where there is none."""
        self.sampling = SamplingRows(max_num_seqs, vocab_size, transfers)
        self.draws = np.ones(max_num_seqs, dtype=np.bool_)
        """Whether the rank chooses the tokens, or the core does. On the host, as `prompt_lens` is."""
        self.prompt_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self.extra_keys: list[tuple[bytes, ...]] = [()] * max_num_seqs
        """See `RequestSpec`."""
        self.num_slots = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """Positions that each row's own blocks have room for; entries of its tables behind them are of whoever had the
        row before."""
        self.num_blocks_used = 0
        """Of the KV cache: the highest block that a row ever had, and those below."""
        self.version = 0
        """Grows whenever rows begin to be sampled in another way."""
        self.tensors = RowTensors(self.token_ids, self.num_computed, self.drafts, self.block_tables)
        self._transfers = transfers

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan changes, in its order."""
        if plan.added:
            self._add(plan.added)
        if plan.forks:
            self._fork(plan.forks)
        if len(plan.table_writes):
            self._write_tables(plan.table_writes)
        if len(plan.token_writes):
            self._write_tokens(plan.token_writes)

    def take_returned(self, plan: StepPlan) -> None:
        """On a stage that draws nothing: the tokens that were drawn or chosen elsewhere, after which all but the last
        known token is computed, and the drafts."""
        returned = plan.returned
        if returned is None:
            return
        if len(returned.token_writes):
            self._write_tokens(returned.token_writes)
        if not len(returned.token_writes) and not len(plan.token_writes) and not returned.drafts.size:
            return
        written = np.concatenate((plan.token_writes[:, 0], returned.token_writes[:, 0])).astype(np.int64)
        decodes = plan.rows[: plan.num_decodes].astype(np.int64)
        drafts = np.ascontiguousarray(returned.drafts)
        written_rows, decoding_rows, own_drafts = self._transfers.upload(written, decodes, drafts)
        self.num_computed[written_rows] = self.num_known[written_rows] - 1
        if drafts.size:
            store_drafts(self, decoding_rows, own_drafts)

    def advance_unsampled(self, plan: StepPlan, seq_lens: Tensor) -> None:
        """Chunks that nothing is drawn after are computed; `seq_lens` int32 [num_requests] are the step's."""
        if plan.samples.all():
            return
        requests = np.flatnonzero(~plan.samples)
        index, rows = self._transfers.upload(requests, plan.rows[requests].astype(np.int64))
        self.num_computed[rows] = seq_lens[index]

    def _add(self, added: tuple[NewSequence, ...]) -> None:
        self.version += 1
        rows = [new.row for new in added]
        known = [np.array(new.token_ids, dtype=np.int32) for new in added]
        lengths = [
            [len(tokens), new.num_computed_tokens, new.spec.num_prompt_tokens]
            for new, tokens in zip(added, known, strict=True)
        ]
        index, state, token_ids = self._transfers.upload(
            np.array(rows, dtype=np.int64),
            np.array(lengths, dtype=np.int32).T,
            np.concatenate(known),
        )
        self._lengths[:, index] = state
        # Not `[index] = -1`: some versions of torch send the number from pageable memory, which waits for the device.
        self.drafts.index_fill_(0, index, -1)
        self.num_slots.index_fill_(0, index, 0)
        self.sampling.write(rows, [new.spec.sampling for new in added])
        start = 0
        for new, tokens in zip(added, known, strict=True):
            own = token_ids[start : start + len(tokens)]
            start += len(tokens)
            self.token_ids[new.row, : len(own)] = own
            self.draws[new.row] = not new.num_candidates
            self.prompt_lens[new.row] = new.spec.num_prompt_tokens
            self.extra_keys[new.row] = new.spec.extra_keys

    def _fork(self, forks: tuple[Fork, ...]) -> None:
        """A gather is complete before what it is assigned to changes, so sources may be targets as well."""
        self.version += 1
        sources, targets = [fork.source_row for fork in forks], [fork.target_row for fork in forks]
        source, target = self._transfers.upload(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))
        self.token_ids[target] = self.token_ids[source]
        self._lengths[:, target] = self._lengths[:, source]
        self.block_tables[:, target] = self.block_tables[:, source]
        self.drafts[target] = self.drafts[source]
        # Its parent may go on to blocks that it does not share; writes will tell.
        self.num_slots.index_fill_(0, target, 0)
        self.draws[targets] = self.draws[sources]
        self.prompt_lens[targets] = self.prompt_lens[sources]
        for row, keys in zip(targets, [self.extra_keys[row] for row in sources], strict=True):
            self.extra_keys[row] = keys
        self.sampling.write(targets, [fork.sampling for fork in forks])

    def _write_tables(self, writes: Int32Array) -> None:
        self.num_blocks_used = max(self.num_blocks_used, int(writes[:, 3].max()) + 1)
        (columns,) = self._transfers.upload(np.ascontiguousarray(writes.T))
        row, group, index, block_id = columns
        self.block_tables[group, row, index] = block_id
        self.num_slots.scatter_reduce_(0, row.long(), (index.long() + 1) * self.block_size, "amax")

    def _write_tokens(self, writes: Int32Array) -> None:
        """A row's writes come in the order of their positions: the last says how many tokens it knows."""
        last = np.array(list({int(row): line for line, row in enumerate(writes[:, 0])}.values()))
        columns, lasts = self._transfers.upload(np.ascontiguousarray(writes.T), last)
        row, position, token_id = columns
        self.token_ids[row, position] = token_id
        self.num_known[row[lasts]] = position[lasts] + 1


def store_drafts(rows: Rows, index: Tensor, drafts: Tensor) -> None:
    """Keep guesses int32 [n, num_proposals] of rows int64 [n]; columns beyond them hold none."""
    rows.drafts.index_fill_(0, index, -1)
    if drafts.shape[1]:
        rows.drafts[index, : drafts.shape[1]] = drafts
