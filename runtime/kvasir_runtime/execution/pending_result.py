"""A step's results on their way from the device, and what the scheduler gets once they have arrived."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.execution.logprobs import LogprobTensors, entries
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.verify_drafts import VerifiedTokens
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.scheduling.step import Candidates, StepResult


class Part(Enum):
    """What a step's result is put together from, besides the scores of prompts."""

    VERIFIED = auto()
    LOGPROBS = auto()
    CANDIDATES = auto()


PartKey = Part | int
"""A number is the row of a scored prompt."""


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
    is_warming_up: bool = False

    def parts(self) -> dict[PartKey, tuple[Tensor, ...]]:
        """What the host gets to see."""
        parts: dict[PartKey, tuple[Tensor, ...]] = {Part.VERIFIED: (self.verified.packed,)}
        if self.logprobs is not None:
            parts[Part.LOGPROBS] = self.logprobs.tensors()
        if self.candidates is not None:
            parts[Part.CANDIDATES] = self.candidates
        for row, scores in self.prompts:
            parts[row] = scores.tensors()
        return parts


class PendingResult:
    """`result` waits for the device; steps may be computed in between."""

    def __init__(self, step: StepTensors, positions: SampledPositions, rows: Rows, transfers: Transfers) -> None:
        self._step = step
        self._positions = positions
        # The rows may serve other sequences by the time that the result is read.
        self._numbers = rows.sampling.num_logprobs[positions.host_rows] if step.logprobs is not None else None
        self._num_candidates = rows.num_candidates[positions.host_rows] if step.candidates is not None else None
        self._num_prompt_logprobs = {row: int(rows.sampling.num_prompt_logprobs[row]) for row, _ in step.prompts}
        parts = step.parts()
        self._num_arrays = {key: len(tensors) for key, tensors in parts.items()}
        self._download = transfers.download([tensor for tensors in parts.values() for tensor in tensors])

    def result(self) -> StepResult:
        parts = self._parts()
        verified = VerifiedTokens(torch.from_numpy(parts[Part.VERIFIED][0]), self._step.verified.width)
        num_accepted = verified.num_accepted.numpy()
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if Part.LOGPROBS in parts:
            logprobs = self._logprobs(parts[Part.LOGPROBS], num_accepted)
        candidates: dict[int, Candidates] = {}
        if Part.CANDIDATES in parts:
            candidates = self._candidates(*parts[Part.CANDIDATES])
        return StepResult(
            token_ids=verified.token_ids.numpy(),
            num_accepted=num_accepted,
            num_drafts=verified.num_drafts.numpy(),
            logprobs=logprobs,
            prompt_logprobs={
                row: _prompt_logprobs(parts[row], number) for row, number in self._num_prompt_logprobs.items()
            },
            candidates=candidates,
            processor_seconds=self._step.processor_seconds,
            proposer_seconds=self._step.proposer_seconds,
            is_catching_up=self._step.is_catching_up,
            is_warming_up=self._step.is_warming_up,
        )

    def _parts(self) -> dict[PartKey, list[NDArray[Any]]]:
        """`StepTensors.parts` on the host."""
        arrays = iter(self._download.arrays())
        return {key: [next(arrays) for _ in range(number)] for key, number in self._num_arrays.items()}

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


def _prompt_logprobs(scores: list[NDArray[Any]], number: int) -> list[TokenLogprobs]:
    ids, values, ranks = scores
    return entries(ids, values, ranks, [number] * len(ids))
