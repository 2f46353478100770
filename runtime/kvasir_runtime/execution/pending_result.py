"""A step's results on their way from the device, and what the scheduler gets once they have arrived."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.execution.logprobs import LogprobTensors, entries
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.verify_drafts import VerifiedTokens
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.scheduling.step import Candidates, StepResult


@dataclass(slots=True)
class StepTensors:
    """What a step computed for its result, on the device."""

    verified: VerifiedTokens
    logprobs: LogprobTensors | None = None
    """Of the positions in `SampledPositions.logprobs`."""
    candidates: tuple[Tensor, Tensor] | None = None
    """Token ids and log-probabilities [num_beams, most candidates]."""
    prompts: list[tuple[int, LogprobTensors]] = field(default_factory=list)
    """Row and scores of each scored prompt."""
    processor_seconds: float | None = None
    proposer_seconds: float = 0.0
    is_catching_up: bool = False
    """The proposer, with steps that it was not shown."""

    def flat(self) -> list[Tensor]:
        parts = [self.verified.token_ids, self.verified.num_accepted, self.verified.num_drafts]
        if self.logprobs is not None:
            parts.extend(self.logprobs.tensors())
        if self.candidates is not None:
            parts.extend(self.candidates)
        for _, scores in self.prompts:
            parts.extend(scores.tensors())
        return parts


class PendingResult:
    """`result` waits for the device; steps may be computed in between."""

    def __init__(self, step: StepTensors, positions: SampledPositions, rows: Rows, transfers: Transfers) -> None:
        self._step = step
        self._positions = positions
        # The rows may serve other sequences by the time that the result is read.
        self._numbers = rows.sampling.num_logprobs[positions.host_rows] if step.logprobs is not None else None
        self._num_candidates = rows.num_candidates[positions.host_rows] if step.candidates is not None else None
        self._num_prompt_logprobs = [int(rows.sampling.num_prompt_logprobs[row]) for row, _ in step.prompts]
        self._download = transfers.download(step.flat())

    def result(self) -> StepResult:
        arrays = self._download.arrays()
        token_ids, num_accepted, num_drafts = arrays[:3]
        rest = arrays[3:]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if self._step.logprobs is not None:
            logprobs, rest = self._logprobs(rest[:3], num_accepted), rest[3:]
        candidates: dict[int, Candidates] = {}
        if self._step.candidates is not None:
            candidates, rest = self._candidates(rest[0], rest[1]), rest[2:]
        return StepResult(
            token_ids=token_ids,
            num_accepted=num_accepted,
            num_drafts=num_drafts,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(rest),
            candidates=candidates,
            processor_seconds=self._step.processor_seconds,
            proposer_seconds=self._step.proposer_seconds,
            is_catching_up=self._step.is_catching_up,
        )

    def _logprobs(self, scores: list[NDArray[Any]], num_accepted: NDArray[Any]) -> dict[int, list[TokenLogprobs]]:
        """Entries of the tokens that hold, by row."""
        positions = self._positions
        assert positions.logprobs is not None
        assert self._numbers is not None
        sequence_of = np.repeat(np.arange(len(positions.host_rows)), np.diff(positions.host_starts))
        index = positions.logprobs.host_index
        sequences = sequence_of[index]
        offsets = index - positions.host_starts[sequences]
        by_row: dict[int, list[TokenLogprobs]] = {}
        lines = entries(scores[0], scores[1], scores[2], self._numbers[sequences].tolist())
        for sequence, offset, entry in zip(sequences.tolist(), offsets.tolist(), lines, strict=True):
            if offset < num_accepted[sequence]:
                by_row.setdefault(int(positions.host_rows[sequence]), []).append(entry)
        return by_row

    def _candidates(self, token_ids: NDArray[Any], logprobs: NDArray[Any]) -> dict[int, Candidates]:
        assert self._num_candidates is not None
        beams = np.flatnonzero(self._num_candidates)
        rows, numbers = self._positions.host_rows[beams].tolist(), self._num_candidates[beams].tolist()
        return {
            row: Candidates(ids[:number], values[:number])
            for row, number, ids, values in zip(rows, numbers, token_ids.tolist(), logprobs.tolist(), strict=True)
        }

    def _prompt_logprobs(self, arrays: list[NDArray[Any]]) -> dict[int, list[TokenLogprobs]]:
        scores = {}
        for line, ((row, _), number) in enumerate(zip(self._step.prompts, self._num_prompt_logprobs, strict=True)):
            ids, values, ranks = arrays[3 * line : 3 * line + 3]
            scores[row] = entries(ids, values, ranks, [number] * len(ids))
        return scores
