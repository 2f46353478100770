"""Inputs of one graph: tensors that stay where they are, into whose front each step is copied.

Behind the step's requests stand padding requests: no sequence, so they read no key. Behind its tokens stand padding
tokens: slots -1, so they write none. Where requests may differ in length a padding token belongs to no request, and
what is computed of it is undefined: NaN, maybe.
"""

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import GroupInputs, StepInputs
from kvasir_runtime.attention.step_lengths import StepLengths


class StaticInputs:
    def __init__(
        self,
        num_requests: int,
        num_tokens: int,
        block_tables: Tensor,
        max_seq_len: int,
        max_query_len: int | None = None,
    ) -> None:
        """For decodes over block_tables int32 [num_groups, max_num_seqs, max_blocks], all padding to begin with.

        `num_tokens` and `max_query_len` as in `GraphShape`.
        """
        device = block_tables.device
        longest = num_tokens // num_requests if max_query_len is None else max_query_len
        self._slots = torch.full((len(block_tables), num_tokens), -1, dtype=torch.int64, device=device)
        # As unequal as they may be, since launches are sized by the longest.
        ends = np.minimum(np.arange(num_requests + 1, dtype=np.int32) * longest, num_tokens)
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * longest
        self.inputs = StepInputs(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            query_starts=starts.clamp_(max=num_tokens),
            seq_lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
            rows=torch.zeros(num_requests, dtype=torch.int32, device=device),
            groups=tuple(GroupInputs(table, slots) for table, slots in zip(block_tables, self._slots, strict=True)),
            lengths=StepLengths(np.diff(ends), num_requests, max_seq_len),
        )
        self._has_drafts = num_tokens > num_requests
        self._num_requests = self._num_tokens = 0
        """Of the step that is there."""

    def load(self, step: StepInputs) -> None:
        """Copy a step of no more requests and tokens. What is left of a larger one becomes padding."""
        own, num_requests, num_tokens = self.inputs, len(step.lengths.query_lens), step.lengths.num_tokens
        own.token_ids[:num_tokens].copy_(step.token_ids)
        own.positions[:num_tokens].copy_(step.positions)
        own.seq_lens[:num_requests].copy_(step.seq_lens)
        own.rows[:num_requests].copy_(step.rows)
        for slots, group in zip(self._slots, step.groups, strict=True):
            slots[:num_tokens].copy_(group.slots)
        if self._has_drafts:
            own.query_starts[: num_requests + 1].copy_(step.query_starts)
            own.query_starts[num_requests + 1 :].fill_(num_tokens)
        if num_requests < self._num_requests:
            own.seq_lens[num_requests:].zero_()
        if num_tokens < self._num_tokens:
            self._slots[:, num_tokens:].fill_(-1)
        self._num_requests, self._num_tokens = num_requests, num_tokens
