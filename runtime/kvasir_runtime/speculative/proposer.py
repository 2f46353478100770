"""The seam of speculative decoding: something that guesses the next tokens of each sequence.

Proposers run on the rank, after a step's tokens were verified, and their guesses wait in the rows for the next step.
They decide nothing: a wrong guess costs time, never a token. While drafts do not pay they are not shown the steps at
all, so each must find out by itself what it has missed of a row, and make up for it or do without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import LayerCache, StepInputs
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.decoder import ComputeStep


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """What the host knows of the sequences in a step."""

    rows: NDArray[np.int32]  # [num_requests]
    is_resumed: NDArray[np.bool_]  # [num_requests]
    """Whether the proposer was not shown the step before of a sequence: new and forked ones, and those that went on
    without drafts."""
    sampled_rows: NDArray[np.int32]  # [num_sampled]
    extra_keys: Sequence[tuple[bytes, ...]]  # [num_sampled]
    """Texts of different keys must not show in each other's drafts, nor in their time."""

    @property
    def resumed_rows(self) -> NDArray[np.int32]:
        rows: NDArray[np.int32] = self.rows[self.is_resumed]
        return rows


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What a proposer may look at after a step: its inputs, hidden states, and which tokens now hold."""

    inputs: StepInputs
    hidden: Tensor  # [num_tokens, hidden_size], after the last norm; of all tokens where `wants_hidden`
    captured: tuple[Tensor, ...]  # each [num_tokens, hidden_size], of the layers in `captured_layers`
    sampled: Tensor  # int64 [num_sampled], indices of the requests that sampled
    rows: Tensor  # int64 [num_sampled], their rows
    last_accepted: Tensor  # int64 [num_sampled], index (into the step's tokens) of each one's last token that holds
    next_tokens: Tensor  # int64 [num_sampled], the token drawn after it, not yet computed
    num_known: Tensor  # int64 [num_sampled], tokens known now, the drawn one included
    num_slots: Tensor  # int64 [num_sampled], positions that each one's row has blocks for
    token_ids: Tensor  # int32 [max_num_seqs, max_model_len + 1], all rows' known tokens
    batch: BatchRows
    block_copies: NDArray[np.int32]  # [m, 2]: source and target block id, made before the step was computed
    num_proposals: int
    """Drafts wanted for each, one at least."""


def as_found(counts: Tensor) -> Tensor:
    """Where no rank makes drafts beside this one, or none has to keep step with it."""
    return counts


def kernel_by_kernel(compute: ComputeStep, query_lens: Sequence[int]) -> ComputeStep:
    """Where there are no CUDA graphs."""
    return compute


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSetup:
    """What a runner gives its proposer."""

    caches: Sequence[LayerCache]
    """Of its `kv_specs`."""
    max_num_seqs: int
    max_drafts: int
    never_waits: bool = False
    """On CUDA: while a step's sequences are those of the last one, the host must not read what the device holds. What
    would decide a shape is then taken at its most."""
    on_graphs: Callable[[ComputeStep, Sequence[int]], ComputeStep] = kernel_by_kernel
    """The same passes, run on CUDA graphs where no sequence has more tokens than the largest of the numbers given."""
    agree: Callable[[Tensor], Tensor] = as_found
    """The first tensor-parallel rank's numbers: ranks may round differently, but capture the same passes together."""


class Proposer(Protocol):
    """One method of guessing."""

    name: str
    wants_hidden: bool
    """Whether `hidden` and `captured` must hold every token of the step, not only those that are sampled after."""
    captured_layers: tuple[int, ...]
    """Layers of the target before which the residual stream is captured (EAGLE-3); mostly none."""

    @property
    def kv_specs(self) -> Sequence[KvSpec]:
        """KV of layers of its own; they join the target's groups in the same pool."""

    def bind(self, setup: ProposerSetup) -> None:
        """Called by each runner, before its first step."""

    def propose(self, step: VerifiedStep) -> Tensor:
        """Guesses int32 [num_sampled, num_proposals]; -1 from where there is none."""
