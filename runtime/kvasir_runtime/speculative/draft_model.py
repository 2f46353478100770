"""A smaller model with the target's vocabulary that guesses by going on alone (Leviathan et al. 2023).

Its layers keep their KV in the target's blocks. While it drafts, prompts run through it chunk by chunk as they run
through the target; steps that propose nothing cost it nothing. When drafts are wanted (again) it computes what it lacks
of a sequence, a bounded number of tokens a step, also where others filled the sequence's blocks without it. Its most
likely tokens are drafted, for sampled requests too (docs/decisions/0010-drafts-are-coupled.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, LayerCache, StepInputs
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.decoder import Decoder, DecoderOutput
from kvasir_runtime.speculative.draft_inputs import DraftRows, draft_rows, prefill_chunks
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep, as_found
from kvasir_runtime.speculative.slot_contents import SlotContents

MAX_CATCH_UP = 512
"""Tokens a step that the draft may compute beyond the newest of each sequence; sequences behind get no drafts yet."""
MOST_LACKING = 2
"""Tokens that a sequence in step with its draft lacks: the newest, and the last draft where all of them held."""


class DraftModelProposer:
    name = "draft_model"
    wants_hidden = False
    captured_layers: tuple[int, ...] = ()

    def __init__(
        self, decoder: Decoder, backend: AttentionBackend, dtype: torch.dtype, max_catch_up: int = MAX_CATCH_UP
    ) -> None:
        self._max_catch_up = max_catch_up
        self._decoder = decoder
        self._backend = backend
        self._caches: Sequence[LayerCache] = ()
        self._group = 0
        self._never_waits = False
        self._agree: Callable[[Tensor], Tensor] = as_found
        self._unchecked_rows: set[int] = set()
        """Rows that may lack more than what is new since the last step."""
        self.kv_specs: Sequence[KvSpec] = decoder.kv_specs(dtype)

    def bind(self, setup: ProposerSetup) -> None:
        self._caches, self._never_waits, self._agree = setup.caches, setup.never_waits, setup.agree
        self._group = setup.caches[0].group
        self._contents = SlotContents(setup.caches[0])
        query_lens = [MOST_LACKING, 1] if setup.max_drafts > 1 else [MOST_LACKING]
        self._compute = setup.on_graphs(self._kernel_by_kernel, query_lens)

    def propose(self, step: VerifiedStep) -> Tensor:
        """Waits for the device where some sequence may not be in step."""
        self._unchecked_rows.update(step.batch.resumed_rows.tolist())
        self._contents.copy_blocks(step.block_copies)
        chunks = prefill_chunks(step.inputs)
        if chunks is not None:
            self._follow(step, chunks)
        if not len(step.rows):
            return step.token_ids.new_empty((0, step.num_proposals))
        sequences = draft_rows(step, self._caches[0].key.shape[1], step.num_proposals + 1)
        if self._never_waits and self._are_in_step(step):
            return self._draft(step, sequences, self._after_newest(step, sequences))
        lacking = self._num_lacking(step)
        query_lens = _caught_up(lacking, self._max_catch_up)
        first = step.num_known - torch.from_numpy(lacking).to(step.num_known.device)
        drafts = self._draft(step, sequences, self._catch_up(step, sequences, first, query_lens))
        is_caught_up = torch.from_numpy(self._note_progress(step, lacking, query_lens)).to(drafts.device)
        return torch.where(is_caught_up.unsqueeze(1), drafts, -1)

    def _are_in_step(self, step: VerifiedStep) -> bool:
        return self._unchecked_rows.isdisjoint(step.batch.sampled_rows.tolist())

    def _follow(self, step: VerifiedStep, chunks: StepInputs) -> None:
        """Compute chunks of prompts. What is made behind a gap is no good, and must not look as if it were."""
        group, rows = chunks.groups[self._group], chunks.rows.long()
        before = chunks.positions[chunks.query_starts[:-1].long()].unsqueeze(1) - 1
        place = before.clamp(min=0)
        is_own, _ = self._contents.held(group, rows, place, step.token_ids[rows.unsqueeze(1), place].long())
        is_behind_gap = ~(is_own | (before < 0)).squeeze(1)
        self._forward(chunks, kept_tokens=chunks.query_starts[1:2].long() - 1)  # only the KV is wanted
        lengths = chunks.query_starts.diff().long()
        of_token = torch.repeat_interleave(is_behind_gap, lengths, output_size=chunks.token_ids.shape[0])
        self._contents.forget(torch.where(of_token, group.slots, -1))

    def _num_lacking(self, step: VerifiedStep) -> NDArray[np.int64]:
        """Known tokens [num_sampled], the newest and those before it, whose KV the draft does not have: looked for
        among the last few of sequences that are in step, among all of the others."""
        num_lacking = self._num_lacking_of(step, step.rows, step.num_known, MOST_LACKING)
        may_lack_more = np.isin(step.batch.sampled_rows, list(self._unchecked_rows))
        if may_lack_more.any():
            own = torch.from_numpy(may_lack_more.nonzero()[0]).to(num_lacking.device)
            longest = step.inputs.lengths.max_seq_len
            num_lacking[own] = self._num_lacking_of(step, step.rows[own], step.num_known[own], longest)
        return self._agree(num_lacking).cpu().numpy()

    def _num_lacking_of(self, step: VerifiedStep, rows: Tensor, num_known: Tensor, longest: int) -> Tensor:
        """Of the newest token [n] and the `longest` before it."""
        positions = (num_known - 1).unsqueeze(1) - torch.arange(longest, 0, -1, device=rows.device)
        group, places = step.inputs.groups[self._group], positions.clamp(min=0)
        is_own, _ = self._contents.held(group, rows, places, step.token_ids[rows.unsqueeze(1), places].long())
        return 1 + longest - (is_own | (positions < 0)).long().cumprod(1).sum(1)

    def _draft(self, step: VerifiedStep, sequences: DraftRows, first: Tensor) -> Tensor:
        """Guesses int32 [num_sampled, num_proposals], of which the `first` [num_sampled] are given; -1 from where KV
        could not be written."""
        drafts = [first]
        for place in range(step.num_proposals - 1):
            drafts.append(self._most_likely(sequences.decodes(drafts[-1], step.num_known + place), kept_tokens=None))
        places = torch.arange(step.num_proposals, device=first.device)
        was_written = (step.num_known - 1).unsqueeze(1) + places < sequences.num_slots.unsqueeze(1)
        return torch.where(was_written, torch.stack(drafts, 1), -1).int()

    def _after_newest(self, step: VerifiedStep, sequences: DraftRows) -> Tensor:
        """The most likely token after each sequence that is in step: one that the draft lacks, and that before it."""
        first = step.num_known - MOST_LACKING
        places = first.unsqueeze(1) + torch.arange(MOST_LACKING, device=first.device)
        token_ids = step.token_ids[step.rows.unsqueeze(1), places].long().flatten()
        hidden = self._forward(sequences.decodes(token_ids, first, MOST_LACKING), kept_tokens=None)
        newest = hidden[MOST_LACKING - 1 :: MOST_LACKING].contiguous()
        return self._decoder.logits(newest).argmax(-1)

    def _note_progress(
        self, step: VerifiedStep, lacking: NDArray[np.int64], query_lens: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Which sequences [num_sampled] lack nothing any more."""
        is_caught_up: NDArray[np.bool_] = query_lens == lacking
        self._unchecked_rows.difference_update(step.batch.sampled_rows.tolist())
        self._unchecked_rows.update(step.batch.sampled_rows[~is_caught_up].tolist())
        return is_caught_up

    def _catch_up(
        self, step: VerifiedStep, sequences: DraftRows, first: Tensor, query_lens: NDArray[np.int32]
    ) -> Tensor:
        """Compute known tokens from `first` on; the most likely token after the last of each sequence."""
        inputs = sequences.window(step.next_tokens, first, query_lens)
        rows = torch.repeat_interleave(
            step.rows, inputs.query_starts.diff().long(), output_size=inputs.positions.shape[0]
        )
        inputs = replace(inputs, token_ids=step.token_ids[rows, inputs.positions].long())
        return self._most_likely(inputs, kept_tokens=inputs.query_starts[1:].long() - 1)

    def _most_likely(self, inputs: StepInputs, kept_tokens: Tensor | None) -> Tensor:
        return self._decoder.logits(self._forward(inputs, kept_tokens)).argmax(-1)

    def _forward(self, inputs: StepInputs, kept_tokens: Tensor | None) -> Tensor:
        return self._compute(inputs, kept_tokens).hidden

    def _kernel_by_kernel(
        self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True
    ) -> DecoderOutput:
        attention = self._backend.prepare(inputs)
        self._contents.note(inputs.groups[self._group].slots, inputs.positions, inputs.token_ids)
        return self._decoder(inputs.token_ids, attention, self._caches, kept_tokens)


def _caught_up(lacking: NDArray[np.int64], most: int) -> NDArray[np.int32]:
    """Tokens to compute now, at least one a sequence: everything, as far as `most` beyond that go round."""
    spare = np.clip(most - np.concatenate(([0], (lacking - 1).cumsum()[:-1])), 0, None)
    query_lens: NDArray[np.int32] = np.minimum(lacking, 1 + spare).astype(np.int32)
    return query_lens
