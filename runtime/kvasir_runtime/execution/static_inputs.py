"""Inputs of one graph: tensors that stay where they are, into whose front each step is copied.

Behind the step's requests stand padding requests: no sequence, so they read no key. Behind its tokens stand padding
tokens: slots -1, so they write none. Where requests may differ in length a padding token belongs to no request, and
what is computed of it is undefined: NaN, maybe.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS, GroupInputs, StepInputs
from kvasir_runtime.attention.step_lengths import StepLengths
from kvasir_runtime.kernels.inputs import DecodeTensors, LoadInputs, load_inputs_reference


class StaticInputs:
    def __init__(
        self,
        num_requests: int,
        num_tokens: int,
        block_tables: Tensor,
        max_seq_len: int,
        max_query_len: int | None = None,
        load_inputs: LoadInputs = load_inputs_reference,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        """For decodes over block_tables int32 [num_groups, max_num_seqs, max_blocks], all padding to begin with.

        `num_tokens` and `max_query_len` as in `GraphShape`; `extras` are those of all steps.
        """
        device = block_tables.device
        longest = num_tokens // num_requests if max_query_len is None else max_query_len
        # As unequal as they may be, since launches are sized by the longest.
        ends = np.minimum(np.arange(num_requests + 1, dtype=np.int32) * longest, num_tokens)
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * longest
        self.inputs = StepInputs(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            query_starts=starts.clamp_(max=num_tokens),
            seq_lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
            rows=torch.zeros(num_requests, dtype=torch.int32, device=device),
            groups=tuple(
                GroupInputs(table, torch.full((num_tokens,), -1, dtype=torch.int64, device=device))
                for table in block_tables
            ),
            lengths=StepLengths(np.diff(ends), num_requests, max_seq_len),
            extras=extras,
        )
        self._load = load_inputs
        self._tensors = _tensors(self.inputs)

    def load(self, step: StepInputs) -> None:
        """Copy a step of no more requests and tokens. What is left of a larger one becomes padding."""
        self._load(_tensors(step), self._tensors)


def _tensors(inputs: StepInputs) -> DecodeTensors:
    slots = tuple(group.slots for group in inputs.groups)
    return DecodeTensors(inputs.token_ids, inputs.positions, slots, inputs.query_starts, inputs.seq_lens, inputs.rows)
