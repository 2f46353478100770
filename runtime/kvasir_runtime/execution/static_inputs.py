"""Inputs of one graph: tensors that stay where they are, into whose front each step is copied.

Behind the step's requests stand padding requests: no sequence, slots -1, so they read no key and write none.
"""

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import GroupInputs, StepInputs
from kvasir_runtime.attention.step_lengths import StepLengths


class StaticInputs:
    def __init__(self, num_requests: int, query_len: int, block_tables: Tensor, max_seq_len: int) -> None:
        """For decodes over block_tables int32 [num_groups, max_num_seqs, max_blocks], all padding to begin with."""
        num_tokens, device = num_requests * query_len, block_tables.device
        self._slots = torch.full((len(block_tables), num_tokens), -1, dtype=torch.int64, device=device)
        query_lens = np.full(num_requests, query_len, dtype=np.int32)
        self.inputs = StepInputs(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            query_starts=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * query_len,
            seq_lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
            rows=torch.zeros(num_requests, dtype=torch.int32, device=device),
            groups=tuple(GroupInputs(table, slots) for table, slots in zip(block_tables, self._slots, strict=True)),
            lengths=StepLengths(query_lens, num_requests, max_seq_len),
        )
        self._num_loaded = 0

    def load(self, step: StepInputs) -> None:
        """Copy a step of no more requests, each of `query_len` tokens. What is left of a larger one becomes padding."""
        own, num_requests, num_tokens = self.inputs, len(step.lengths.query_lens), step.lengths.num_tokens
        if num_requests < self._num_loaded:
            own.seq_lens[num_requests:].zero_()
            own.token_ids[num_tokens:].zero_()
            own.positions[num_tokens:].zero_()
            self._slots[:, num_tokens:].fill_(-1)
        own.token_ids[:num_tokens].copy_(step.token_ids)
        own.positions[:num_tokens].copy_(step.positions)
        own.seq_lens[:num_requests].copy_(step.seq_lens)
        own.rows[:num_requests].copy_(step.rows)
        for slots, group in zip(self._slots, step.groups, strict=True):
            slots[:num_tokens].copy_(group.slots)
        self._num_loaded = num_requests
