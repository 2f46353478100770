"""A smaller model with the target's vocabulary that guesses by going on alone (Leviathan et al. 2023).

Its layers keep their KV in the target's blocks. Prompts run through it chunk by chunk as they run through the target.
Steps that propose nothing cost it nothing: it catches up with a sequence when drafts are next wanted, a bounded number
of tokens a step. Its most likely tokens are drafted, for sampled requests too
(docs/decisions/0010-drafts-are-coupled.md).

Blocks that filled while nothing was proposed may be matched by another request before the draft has caught up, and its
drafts are then worse for it; the target's tokens never are.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, LayerCache, StepInputs
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.decoder import Decoder, kv_specs
from kvasir_runtime.speculative.draft_inputs import DraftRows, draft_rows, prefill_chunks
from kvasir_runtime.speculative.draft_progress import DraftProgress
from kvasir_runtime.speculative.proposer import VerifiedStep

MAX_CATCH_UP = 512
"""Tokens a step that the draft may compute beyond the newest of each sequence; sequences behind get no drafts yet."""


class DraftModelProposer:
    name = "draft_model"
    wants_hidden = False
    captured_layers: tuple[int, ...] = ()

    def __init__(self, decoder: Decoder, backend: AttentionBackend, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._backend = backend
        self._caches: Sequence[LayerCache] = ()
        self._progress = DraftProgress()
        self.kv_specs: Sequence[KvSpec] = kv_specs(decoder.options, dtype)

    def bind(self, caches: Sequence[LayerCache]) -> None:
        self._caches = caches

    def propose(self, step: VerifiedStep) -> Tensor:
        """Where lengths lie on CUDA, reading them waits for the device, once a step."""
        chunks = prefill_chunks(step.inputs)
        if chunks is not None:
            self._forward(chunks, kept_tokens=chunks.query_starts[1:2].long() - 1)  # only the KV is wanted
        behind = self._progress.observe(step)
        if not step.num_proposals or not len(step.rows):
            return step.token_ids.new_full((len(step.rows), step.num_proposals), -1)
        return self._draft(step, behind)

    def _draft(self, step: VerifiedStep, behind: NDArray[np.int64]) -> Tensor:
        """Guesses after the newest token of each sequence, whose last `behind` tokens the draft has not computed."""
        sequences = draft_rows(step, self._caches[0].key.shape[1], step.num_proposals + 1)
        query_lens = _caught_up(behind)
        first = step.num_known - torch.from_numpy(behind).to(step.num_known.device)
        tokens = self._catch_up(step, sequences, first, query_lens)
        position, drafts = step.num_known - 1, [tokens]
        ones = np.ones(len(behind), dtype=np.int32)
        for _ in range(step.num_proposals - 1):
            position = position + 1
            tokens = self._most_likely(sequences.window(tokens, position, ones), kept_tokens=None)
            drafts.append(tokens)
        self._progress.computed(step.rows.tolist(), query_lens, step.num_proposals - 1, sequences.num_slots.tolist())
        return self._usable(torch.stack(drafts, 1), step, sequences, torch.from_numpy(query_lens == behind))

    def _catch_up(
        self, step: VerifiedStep, sequences: DraftRows, first: Tensor, query_lens: NDArray[np.int32]
    ) -> Tensor:
        """Compute known tokens from `first` on; the most likely token after the last of each sequence."""
        inputs = sequences.window(step.next_tokens, first, query_lens)
        rows = torch.repeat_interleave(step.rows, torch.from_numpy(query_lens).to(step.rows.device))
        inputs = StepInputs(
            token_ids=step.token_ids[rows, inputs.positions].long(),
            positions=inputs.positions,
            query_starts=inputs.query_starts,
            seq_lens=inputs.seq_lens,
            rows=inputs.rows,
            groups=inputs.groups,
            lengths=inputs.lengths,
        )
        return self._most_likely(inputs, kept_tokens=inputs.query_starts[1:].long() - 1)

    def _most_likely(self, inputs: StepInputs, kept_tokens: Tensor | None) -> Tensor:
        return self._decoder.logits(self._forward(inputs, kept_tokens)).argmax(-1)

    def _forward(self, inputs: StepInputs, kept_tokens: Tensor | None) -> Tensor:
        attention = self._backend.prepare(inputs)
        return self._decoder(inputs.token_ids, attention, self._caches, kept_tokens).hidden

    def _usable(self, drafts: Tensor, step: VerifiedStep, sequences: DraftRows, is_caught_up: Tensor) -> Tensor:
        """Drafts from KV that was written, of sequences that the draft has caught up with; others are -1."""
        places = torch.arange(drafts.shape[1], device=drafts.device)
        was_written = (step.num_known - 1).unsqueeze(1) + places < sequences.num_slots.unsqueeze(1)
        usable = was_written & is_caught_up.to(drafts.device).unsqueeze(1)
        return torch.where(usable, drafts, -1).int()


def _caught_up(behind: NDArray[np.int64]) -> NDArray[np.int32]:
    """Tokens to compute now, at least one a sequence: everything, as far as MAX_CATCH_UP goes round."""
    spare = np.clip(MAX_CATCH_UP - np.concatenate(([0], (behind - 1).cumsum()[:-1])), 0, None)
    query_lens: NDArray[np.int32] = np.minimum(behind, 1 + spare).astype(np.int32)
    return query_lens
