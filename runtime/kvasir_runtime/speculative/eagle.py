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

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, AttentionStep, LayerCache, StepInputs
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.speculative.draft_inputs import draft_rows
from kvasir_runtime.speculative.eagle_context import EagleContext
from kvasir_runtime.speculative.proposer import VerifiedStep


class EagleHead(Protocol):
    """What EAGLE and EAGLE-3 differ in."""

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the target before which its residual stream is wanted; none: its last hidden states are."""

    @property
    def kv_spec(self) -> KvSpec:
        """Of the head's one layer."""

    def target_states(self, hidden: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        """What entries are made of, [num_tokens, hidden_size], from what the target gave."""

    def forward(self, states: Tensor, token_ids: Tensor, attention: AttentionStep, cache: LayerCache) -> Tensor:
        """Own states [num_tokens, hidden_size] of the entries (state of p, token id of p + 1)."""

    def most_likely(self, states: Tensor) -> Tensor:
        """Token ids int64 [n], in the target's vocabulary."""


class EagleProposer:
    def __init__(self, name: str, head: EagleHead, backend: AttentionBackend) -> None:
        self.name = name
        self.captured_layers = head.captured_layers
        self.wants_hidden = not head.captured_layers
        self.is_catching_up = False
        self.kv_specs: Sequence[KvSpec] = (head.kv_spec,)
        self._head = head
        self._backend = backend
        self._caches: Sequence[LayerCache] = ()

    def bind(self, caches: Sequence[LayerCache]) -> None:
        self._caches = caches
        self._context = EagleContext(caches[0])

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
        return self._forward(states, replace(inputs, token_ids=next_ids))

    def _forward(self, states: Tensor, inputs: StepInputs) -> Tensor:
        self._context.note(inputs)
        attention = self._backend.prepare(self._context.cut(inputs))
        return self._head.forward(states, inputs.token_ids, attention, self._caches[0])

    def _draft(self, step: VerifiedStep, states: Tensor) -> Tensor:
        """Guesses int32 [num_sampled, num_proposals] after the last entries' own states [num_sampled, hidden_size]."""
        head = self._head
        sequences = draft_rows(step, self._caches[0].key.shape[1], step.num_proposals)
        ones = np.ones(len(step.rows), dtype=np.int32)
        last = step.num_known - 2  # position of the last entry
        drafts = [head.most_likely(states)]
        for place in range(1, step.num_proposals):
            inputs = sequences.window(drafts[-1], last + place, ones)
            states = self._forward(states, inputs)
            drafts.append(head.most_likely(states))
        places = torch.arange(step.num_proposals, device=last.device)
        was_written = last.unsqueeze(1) + places < sequences.num_slots.unsqueeze(1)
        return torch.where(was_written, torch.stack(drafts, 1), -1).int()
