"""The positions of a step that a token is drawn after: the last token of a chunk that samples, a decode's token and
each of its drafts. All of it follows from the plan and the rows' traits, so a steady decode lays it out once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampling_rows import Int32Array, Trait
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.scheduling.step import StepPlan

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the positions, or of the sequences."""

    host_index: Int64Array
    index: Tensor  # int64 [n]
    rows: Tensor  # int64 [n]
    is_all: bool

    def of(self, values: Tensor) -> Tensor:
        """The subset's values [n, ...]: all of them themselves, or a copy of some."""
        return values if self.is_all else values[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPositions:
    """Sequence after sequence, in the plan's order; a sequence's positions follow each other."""

    host_requests: Int64Array  # [num_sampled], indices into the plan
    host_rows: Int32Array  # [num_sampled]
    host_starts: Int32Array  # [num_sampled + 1], first position of each sequence, then their number
    host_tokens: Int64Array  # [num_positions]
    requests: Tensor  # int64 [num_sampled]
    rows: Tensor  # int32 [num_sampled]
    starts: Tensor  # int32 [num_sampled + 1]
    draws: Tensor  # bool [num_sampled]; beams draw nothing
    tokens: Tensor  # int64 [num_positions], the step's token that is drawn after
    rows_of: Tensor  # int64 [num_positions]
    num_earlier: Tensor  # int64 [num_positions], drafts of the sequence before the position's token is drawn
    places: Tensor  # int64 [num_positions], in [num_sampled, width] end to end
    width: int
    """Most positions of a sequence."""
    traits: int
    """All that some of the rows need."""
    beams: Subset | None
    drawing: Subset | None
    """Sequences (not positions) that draw; None: there are no beams, so all do."""
    random: Subset | None
    truncated: Subset | None
    """Within `random`, as `min_p`."""
    min_p: Subset | None
    penalised: Subset | None
    biased: Subset | None
    min_tokens: Subset | None
    logprobs: Subset | None

    @property
    def num_positions(self) -> int:
        return len(self.host_tokens)


LayoutKey = tuple[int, int, bytes, bytes, bytes]


class SampledPositionsBuilder:
    def __init__(self, rows: Rows, transfers: Transfers) -> None:
        self._rows = rows
        self._transfers = transfers
        self._last_key: LayoutKey | None = None
        self._last: SampledPositions | None = None

    def build(self, plan: StepPlan, query_lens: Int32Array) -> SampledPositions:
        """For a plan that the rows have taken over, computed with so many tokens a request."""
        key = (
            self._rows.version,
            plan.num_decodes,
            plan.rows.tobytes(),
            plan.samples.tobytes(),
            query_lens.tobytes(),
        )
        if self._last is None or key != self._last_key:
            self._last_key, self._last = key, self._lay_out(plan, query_lens)
        return self._last

    def _lay_out(self, plan: StepPlan, query_lens: Int32Array) -> SampledPositions:
        requests = np.flatnonzero(plan.samples)
        counts = np.where(requests < plan.num_decodes, query_lens[requests], 1)
        starts = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        sequence = np.repeat(np.arange(len(requests)), counts)
        num_earlier = np.arange(len(sequence)) - starts[sequence]
        ends = np.cumsum(query_lens, dtype=np.int64)
        tokens = ends[requests][sequence] - counts[sequence] + num_earlier
        rows = plan.rows[requests]
        rows_of = rows[sequence].astype(np.int64)
        is_beam = self._rows.num_candidates[rows] > 0
        width = int(counts.max(initial=1))
        places = sequence * width + num_earlier
        uploaded = self._transfers.upload(requests, rows, starts, ~is_beam, tokens, rows_of, num_earlier, places)
        traits = self._rows.sampling.traits_of(rows)
        random = self._having(Trait.RANDOM, traits, rows_of)
        random_rows = rows_of[:0] if random is None else rows_of[random.host_index]
        return SampledPositions(
            host_requests=requests,
            host_rows=rows,
            host_starts=starts,
            host_tokens=tokens,
            requests=uploaded[0],
            rows=uploaded[1],
            starts=uploaded[2],
            draws=uploaded[3],
            tokens=uploaded[4],
            rows_of=uploaded[5],
            num_earlier=uploaded[6],
            places=uploaded[7],
            width=width,
            traits=traits,
            beams=self._subset(np.flatnonzero(is_beam[sequence]), rows_of) if is_beam.any() else None,
            drawing=self._subset(np.flatnonzero(~is_beam), rows.astype(np.int64)) if is_beam.any() else None,
            random=random,
            truncated=self._having(Trait.TRUNCATED, traits, random_rows),
            min_p=self._having(Trait.MIN_P, traits, random_rows),
            penalised=self._having(Trait.PENALTIES, traits, rows_of),
            biased=self._having(Trait.LOGIT_BIAS, traits, rows_of),
            min_tokens=self._having(Trait.MIN_TOKENS, traits, rows_of),
            logprobs=self._having(Trait.LOGPROBS, traits, rows_of),
        )

    def _having(self, trait: int, traits: int, rows_of: Int64Array) -> Subset | None:
        if not traits & trait:
            return None
        return self._subset(np.flatnonzero(self._rows.sampling.traits[rows_of] & trait), rows_of)

    def _subset(self, index: Int64Array, rows_of: Int64Array) -> Subset:
        on_device, rows = self._transfers.upload(index, rows_of[index])
        return Subset(index, on_device, rows, is_all=len(index) == len(rows_of))
