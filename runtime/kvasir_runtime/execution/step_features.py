"""What some sequences want of a step besides their tokens: objects that the runner calls, one for each such thing.

A feature keeps its own state by row, sees the step at the points below, and hands over tensors that arrive in
`StepResult.columns` under its name. It is called for the steps that have a row which wants it, so those of plain
sequences cost nothing. A new one is a class, and its place in `runner_assembly.step_features`. Those of the API are at
the end: log-probabilities of drawn tokens and of prompts, and the candidates of beam searches.
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
from kvasir_runtime.execution.step_inputs import SampledPositions
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.sample import VerifiedTokens
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.scheduling.step import (
    CANDIDATES,
    LOGPROBS,
    PROMPT_LOGPROBS,
    BoolArray,
    StepPlan,
    StepResult,
    StepTimes,
)

TokenMask = NDArray[np.int32]
"""[positions sampled, vocab_size / 32, rounded up or one more]: bit t % 32 of number t / 32 says whether token t may be
drawn."""
TensorColumns = Mapping[str, Tensor | NDArray[Any]]
"""Of equal length: a line each, or the device's and the host's halves of one."""
_POSITIONS_AT_ONCE = 128
"""Of prompts, scored together: a whole prompt's logits over a large vocabulary would take gigabytes."""


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
    wants: BoolArray  # [num_rows]
    """Which rows' sequences want it, as `on_rows` or the rows' own bookkeeping has it."""
    extras: Mapping[str, TokenExtra] = MappingProxyType({})
    """What it fills in for layers to read."""
    asked_by: Callable[[RequestSpec], object] | None = None
    """What asks for it, if true: then, and while any row wants it, `on_rows` is called. None: never, since the rows'
    own bookkeeping has who wants it."""

    def on_rows(self, plan: StepPlan) -> None:
        """The rows have taken over a plan with sequences added or forked, or tokens written."""

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        """Fill in the step's lines of its extras, on every pipeline stage; the step's tokens whose hidden states
        `collect` wants."""
        return None

    def mask(self, step: ForwardedStep) -> TokenMask | None:
        """Which tokens may be drawn, None: all. Called while the device computes the decoder, on ranks that draw."""
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
        self._asked = [(feature, feature.asked_by) for feature in features if feature.asked_by is not None]
        self._rows = rows
        self._key: tuple[int, bytes] | None = None
        self._wanted: tuple[StepFeature, ...] = ()

    def on_rows(self, plan: StepPlan) -> None:
        """To be called when the rows have taken over the plan."""
        if plan.added or plan.forks or len(plan.token_writes):
            specs = [new.spec for new in plan.added]
            for feature, asked_by in self._asked:
                if feature.wants.any() or any(map(asked_by, specs)):
                    feature.on_rows(plan)

    def wanted(self, plan: StepPlan) -> tuple[StepFeature, ...]:
        """Worked out when the rows of a step, or what they want, are others than the last one's."""
        key = self._rows.version, plan.rows.tobytes()
        if key != self._key:
            self._key = key
            self._wanted = tuple(feature for feature in self._features if feature.wants[plan.rows].any())
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
        verified, arrived = VerifiedTokens.of(torch.from_numpy(packed), self._width), iter(of_features)
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


class Logprobs(StepFeature):
    """Of drawn tokens, from the raw logits."""

    name = LOGPROBS

    def __init__(self, rows: Rows) -> None:
        self._sampling = rows.sampling
        self.wants = rows.sampling.wants_logprobs
        self._raw: Tensor | None = None

    def adjust(self, logits: Tensor, positions: SampledPositions) -> Tensor:
        own = positions.having(self.name, self.wants)
        self._raw = None if own is None else own.of(logits)
        return logits

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """A line for each position. `lines` and `offsets` say which token of the result it is about."""
        positions = step.positions
        own, raw = positions.having(self.name, self.wants), self._raw
        if drawn is None or own is None or raw is None:
            return None
        self._raw = None
        numbers = self._sampling.num_logprobs[own.host_rows]
        token_ids = drawn.verified.token_ids.flatten()[positions.places].long()
        return {
            "rows": own.host_rows,
            "numbers": numbers,
            "lines": positions.host_sequences[own.host_index],
            "offsets": positions.host_offsets[own.host_index],
            **token_logprobs(raw, own.of(token_ids), int(numbers.max())),
        }


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> dict[str, Tensor]:
    """Of raw logits [n, vocab_size] and the chosen `token_ids` int64 [n]: the chosen first, then the `most` most likely
    in falling order."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    likely = logprobs.topk(min(most, logprobs.shape[1]), dim=1)
    return {
        "token_ids": torch.cat((token_ids.unsqueeze(1), likely.indices), dim=1),  # int64 [n, 1 + most]
        "logprobs": torch.cat((chosen, likely.values), dim=1),  # float32 [n, 1 + most]
        "ranks": (logprobs > chosen).sum(dim=1) + 1,  # int64 [n], of the chosen one, from 1
    }


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of one chunk whose logits score the prompt token after each."""

    row: int
    tokens: NDArray[np.int64]  # [n], the step's
    first_scored: int
    """Position of the first token that is scored; the others follow it."""


class PromptScores(StepFeature):
    name = PROMPT_LOGPROBS

    def __init__(self, rows: Rows, to_logits: Callable[[Tensor], Tensor]) -> None:
        self._rows = rows
        self.wants = rows.sampling.wants_prompt_logprobs
        self._to_logits = to_logits
        self._prompts: list[ScoredPrompt] = []

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        """Those of the chunks that hold prompt tokens to be scored. A chunk starts where it was planned to."""
        query_lens = inputs.lengths.query_lens
        ends = np.cumsum(query_lens, dtype=np.int64)
        self._prompts = []
        for request in np.flatnonzero(self.wants[plan.rows]).tolist():
            row, first, length = int(plan.rows[request]), int(plan.starts[request]), int(query_lens[request])
            number = min(first + length, int(self._rows.prompt_lens[row]) - 1) - first
            if request >= plan.num_decodes and number > 0:
                tokens = int(ends[request]) - length + np.arange(number)
                self._prompts.append(ScoredPrompt(row, tokens, first + 1))
        return np.concatenate([prompt.tokens for prompt in self._prompts]) if self._prompts else None

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        if not self._prompts:
            return None
        rows = np.repeat([prompt.row for prompt in self._prompts], [len(prompt.tokens) for prompt in self._prompts])
        numbers = self._rows.sampling.num_prompt_logprobs[rows]
        scored_ids = torch.cat([self._scored_ids(prompt) for prompt in self._prompts])
        hidden = step.hidden[self.name]
        parts = [
            token_logprobs(self._to_logits(hidden[some]), scored_ids[some], int(numbers.max()))
            for some in (slice(n, n + _POSITIONS_AT_ONCE) for n in range(0, len(hidden), _POSITIONS_AT_ONCE))
        ]
        return {"rows": rows, "numbers": numbers, **{name: torch.cat([p[name] for p in parts]) for name in parts[0]}}

    def _scored_ids(self, prompt: ScoredPrompt) -> Tensor:
        first = prompt.first_scored
        return self._rows.token_ids[prompt.row, first : first + len(prompt.tokens)].long()


class BeamCandidates(StepFeature):
    """Beams' logits become log-probabilities before anything else, so what adjustments change is summed up as Hugging
    Face sums it."""

    name = CANDIDATES

    def __init__(self, rows: Rows) -> None:
        self._numbers = rows.num_candidates
        self.wants = rows.core_chooses

    def adjust(self, logits: Tensor, positions: SampledPositions) -> Tensor:
        own = positions.having(self.name, self.wants)
        if own is None:
            return logits
        changed = logits.float().nan_to_num(nan=float("-inf"), posinf=torch.finfo(torch.float32).max)
        changed[own.index] = own.of(changed).log_softmax(dim=-1)
        return changed

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """A line for each beam, which has one position."""
        own = step.positions.having(self.name, self.wants)
        if drawn is None or own is None:
            return None
        numbers = self._numbers[own.host_rows]
        adjusted = own.of(drawn.adjusted())
        likely = adjusted.topk(min(int(numbers.max()), adjusted.shape[1]), dim=-1)
        return {"rows": own.host_rows, "numbers": numbers, "token_ids": likely.indices, "logprobs": likely.values}
