"""What some sequences want of a step besides their tokens: objects that the runner calls, one for each such thing.

A feature keeps its own state by row, sees the step at the points below, and hands over tensors that arrive in
`StepResult.columns` under its name. It is called for the steps that have a row which wants it, so those of plain
sequences cost nothing. A new one is a class, and its place in `runner_assembly.step_features`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.sample import VerifiedTokens
from kvasir_runtime.scheduling.step import BoolArray, Int32Array, StepPlan, StepResult, StepTimes

TensorColumns = Mapping[str, Tensor | NDArray[Any]]
"""Of equal length: a line each, or the device's and the host's halves of one."""


@dataclass(frozen=True, slots=True)
class TokenExtra:
    """A buffer that layers read (`StepInputs.extras`): what stands there of each token."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A step whose inputs are laid out."""

    plan: StepPlan
    inputs: StepInputs
    positions: SampledPositions
    hidden: dict[str, Tensor] = field(default_factory=dict)
    """Feature -> hidden states [n, hidden_size] of the tokens that it wanted, once the decoder has run."""


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """What has been drawn."""

    adjusted: Callable[[], Tensor]
    """Works out the logits [num_positions, vocab_size] after all adjustments."""
    verified: VerifiedTokens


class StepFeature:
    """Does nothing at all; each feature says what it does differently. Called on the thread that runs steps, in the
    order of the methods."""

    name: str
    """Also of its columns in a result."""
    extras: Mapping[str, TokenExtra] = MappingProxyType({})
    """What it fills in for layers to read."""

    def on_rows(self, plan: StepPlan) -> None:
        """The rows have taken over a plan with sequences added or forked, or tokens written."""

    def wanted_by(self, rows: Int32Array) -> BoolArray:
        """Which of these rows' sequences want it; until the next `on_rows` its answers stay the same."""
        return np.zeros(len(rows), dtype=np.bool_)

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        """Fill in the step's lines of its extras, on every pipeline stage; the step's tokens whose hidden states
        `collect` wants."""
        return None

    def adjust(self, logits: Tensor, positions: SampledPositions) -> Tensor:
        """Look at logits [num_positions, vocab_size], which stay as they are; those to go on with, the same or new."""
        return logits

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """Take note of what was drawn (None: the step draws nothing), and say what the result is to carry."""
        return None


class StepFeatures:
    """All of a runner's, and which of them a step wants."""

    def __init__(self, features: Sequence[StepFeature], rows: Rows) -> None:
        self._features = tuple(features)
        self._rows = rows
        self._key: tuple[int, bytes] | None = None
        self._wanted: tuple[StepFeature, ...] = ()

    def on_rows(self, plan: StepPlan) -> None:
        """To be called when the rows have taken over the plan."""
        if plan.added or plan.forks or len(plan.token_writes):
            for feature in self._features:
                feature.on_rows(plan)

    def wanted(self, plan: StepPlan) -> tuple[StepFeature, ...]:
        """Worked out when the rows of a step, or what they want, are others than the last one's."""
        key = self._rows.version, plan.rows.tobytes()
        if key != self._key:
            self._key = key
            self._wanted = tuple(feature for feature in self._features if feature.wanted_by(plan.rows).any())
        return self._wanted


def extra_buffers(features: Sequence[StepFeature], max_num_tokens: int, device: torch.device) -> dict[str, Tensor]:
    """All that features fill in: zeros [max_num_tokens, ...]."""
    return {
        name: torch.zeros((max_num_tokens, *extra.shape), dtype=extra.dtype, device=device)
        for feature in features
        for name, extra in feature.extras.items()
    }


class PendingResult:
    """`result` waits for the device; steps may be computed in between."""

    def __init__(
        self, verified: VerifiedTokens, columns: Mapping[str, TensorColumns], times: StepTimes, transfers: Transfers
    ) -> None:
        self._width = verified.width
        self._columns = columns
        self._times = times
        of_features = [column for each in columns.values() for column in each.values() if isinstance(column, Tensor)]
        self._download = transfers.download([verified.packed, *of_features])

    def result(self) -> StepResult:
        packed, *of_features = self._download.arrays()
        verified, arrived = VerifiedTokens(torch.from_numpy(packed), self._width), iter(of_features)
        return StepResult(
            token_ids=verified.token_ids.numpy(),
            num_accepted=verified.num_accepted.numpy(),
            num_drafts=verified.num_drafts.numpy(),
            columns={
                feature: {
                    name: next(arrived) if isinstance(column, Tensor) else column for name, column in columns.items()
                }
                for feature, columns in self._columns.items()
            },
            times=self._times,
        )
