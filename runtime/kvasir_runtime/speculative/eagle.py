"""EAGLE drafts: one layer that goes on from the target's own hidden states (Li et al. 2024 and 2025).

The entry at position p joins the target's hidden state of p with the embedding of the token at p + 1, and guesses the
token at p + 2; the next entry takes the layer's own output as its hidden state. Its KV lies in the target's blocks.
While drafts are wanted every step's tokens run through the layer, prompts too; what was computed without it cannot be
made up for, since those hidden states are gone. The layer then attends from where it is shown the sequence again
(`eagle_context`), which costs a little acceptance and no token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, AttentionStep, LayerCache, StepInputs
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.decoder import DecoderOutput
from kvasir_runtime.speculative.draft_inputs import draft_rows
from kvasir_runtime.speculative.eagle_context import MOST_LOOKED_AT, EagleContext
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep


class EagleHead(Protocol):
    """What EAGLE and EAGLE-3 differ in."""

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the target before which its residual stream is wanted; none: its last hidden states are."""

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Of the head's one layer."""

    def target_states(self, hidden: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        """What entries are made of, [num_tokens, hidden_size], from what the target gave."""

    def forward(
        self, states: Tensor, token_ids: Tensor, attention: AttentionStep, caches: Sequence[LayerCache]
    ) -> Tensor:
        """Own states [num_tokens, hidden_size] of the entries (state of p, token id of p + 1)."""

    def most_likely(self, states: Tensor) -> Tensor:
        """Token ids int64 [n], in the target's vocabulary."""


class EagleProposer:
    def __init__(
        self, name: str, head: EagleHead, backend: AttentionBackend, most_looked_at: int = MOST_LOOKED_AT
    ) -> None:
        """`most_looked_at` as of `EagleContext`."""
        self._most_looked_at = most_looked_at
        self.name = name
        self.captured_layers = head.captured_layers
        self.wants_hidden = not head.captured_layers
        self.kv_specs: Sequence[KvSpec] = head.kv_specs
        self._head = head
        self._backend = backend
        self._entering: Tensor | None = None
        """[most tokens of a decode step, hidden_size], states that entries are made of. It stays where it is, so that
        CUDA graphs may read it."""

    def bind(self, setup: ProposerSetup) -> None:
        self._caches = setup.caches
        self._context = EagleContext(
            self._caches[0],
            setup.max_num_seqs,
            always_cuts=setup.never_waits,
            agree=setup.agree,
            most_looked_at=self._most_looked_at,
        )
        self._most_decoded = setup.max_num_seqs * (1 + setup.max_drafts)
        self._compute = setup.on_graphs(self._kernel_by_kernel, [1 + setup.max_drafts, 1])

    def propose(self, step: VerifiedStep) -> Tensor:
        states = self._follow(step)
        if not len(step.rows):
            return step.token_ids.new_empty((0, step.num_proposals))
        return self._draft(step, states[step.last_accepted])

    def _follow(self, step: VerifiedStep) -> Tensor:
        """Own states of all the step's tokens; those of drafts that did not hold are written over later."""
        inputs, head = step.inputs, self._head
        num_tokens = inputs.token_ids.shape[0]
        rows = torch.repeat_interleave(inputs.rows.long(), inputs.query_starts.diff().long(), output_size=num_tokens)
        next_ids = step.token_ids[rows, inputs.positions + 1].long()
        self._context.begin_step(step)
        states = head.target_states(step.hidden, step.captured)
        inputs = replace(inputs, token_ids=next_ids)
        has_chunks = inputs.lengths.num_decodes < len(inputs.lengths.query_lens)
        return self._forward(states, inputs) if has_chunks else self._decode(states, inputs)

    def _decode(self, states: Tensor, inputs: StepInputs) -> Tensor:
        """As `_forward`, on a graph where there is one: valid until the next call."""
        if self._entering is None:  # warming up decodes
            self._entering = states.new_zeros((self._most_decoded, states.shape[1]))
        self._entering[: len(states)] = states
        compute = self._compute if self._context.may_be_captured else self._kernel_by_kernel
        return compute(inputs, None).hidden

    def _kernel_by_kernel(
        self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True
    ) -> DecoderOutput:
        """Of the first states in `_entering`. Keeps all tokens."""
        assert self._entering is not None, "a decode comes before the graphs of decodes"
        states = self._entering[: len(inputs.token_ids)].clone()  # the head may add to them in place
        return DecoderOutput(self._forward(states, inputs), ())

    def _forward(self, states: Tensor, inputs: StepInputs) -> Tensor:
        self._context.note(inputs)
        attention = self._backend.prepare(self._context.cut(inputs))
        return self._head.forward(states, inputs.token_ids, attention, self._caches)

    def _draft(self, step: VerifiedStep, states: Tensor) -> Tensor:
        """Guesses int32 [num_sampled, num_proposals] after the last entries' own states [num_sampled, hidden_size]."""
        head = self._head
        sequences = draft_rows(step, self._caches[0].key.shape[1], step.num_proposals)
        last = step.num_known - 2  # position of the last entry
        drafts = [head.most_likely(states)]
        for place in range(1, step.num_proposals):
            states = self._decode(states, sequences.decodes(drafts[-1], last + place))
            drafts.append(head.most_likely(states))
        places = torch.arange(step.num_proposals, device=last.device)
        was_written = last.unsqueeze(1) + places < sequences.num_slots.unsqueeze(1)
        return torch.where(was_written, torch.stack(drafts, 1), -1).int()
