"""A step laid out on the device from the plan and the rows: its inputs, and the positions that a token is drawn after,
which are the last token of a chunk that samples, a decode's token and each of its drafts.

What has not changed since the last plan is not uploaded again: a steady decode is laid out once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS, GroupInputs, StepInputs
from kvasir_runtime.execution.rows import Rows, Trait
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.inputs import InputBuffers, PlannedTokens, PrepareInputs, StepLengths
from kvasir_runtime.kernels.sample import PositionTensors
from kvasir_runtime.scheduling.step import BoolArray, Int32Array, StepPlan

Int64Array = NDArray[np.int64]
PlanKey = tuple[int, bytes, bytes]
LayoutKey = tuple[int, int, bytes, bytes, bytes]


class StepInputBuilder:
    """Owns the buffers that every step's inputs are views of; a step's are overwritten by the next one's."""

    def __init__(
        self,
        rows: Rows,
        prepare_inputs: PrepareInputs,
        max_num_tokens: int,
        transfers: Transfers,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        num_groups, max_num_seqs, _ = rows.block_tables.shape
        device = transfers.device
        self.buffers = InputBuffers(
            token_ids=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            slots=torch.zeros((num_groups, max_num_tokens), dtype=torch.int64, device=device),
            query_starts=torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
        )
        self._extras = extras
        self._rows = rows
        self._prepare_inputs = prepare_inputs
        self._transfers = transfers
        self._planned_key: PlanKey | None = None
        self._planned: PlannedTokens | None = None
        self._views: StepInputs | None = None

    def build(self, plan: StepPlan) -> StepInputs:
        """The inputs of a plan that the rows have taken over."""
        planned = self._upload(plan)
        self._prepare_inputs(self._rows.tensors, planned, self._rows.block_size, self.buffers)
        query_lens = self._query_lens(plan, planned)
        max_seq_len = int((plan.starts + plan.num_new_tokens).max())
        return self._view(planned, StepLengths(query_lens, plan.num_decodes, max_seq_len))

    def _upload(self, plan: StepPlan) -> PlannedTokens:
        """The plan on the device; a steady decode's is still there."""
        key = (plan.num_decodes, plan.rows.tobytes(), plan.num_new_tokens.tobytes())
        if self._planned is not None and key == self._planned_key:
            return self._planned
        starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        np.cumsum(plan.num_new_tokens, out=starts[1:])
        rows, starts_on_device = self._transfers.upload(plan.rows.copy(), starts)
        self._planned_key = key
        self._planned = PlannedTokens(
            rows,
            starts_on_device,
            plan.num_decodes,
            num_tokens=int(starts[-1]),
            max_query_len=int(plan.num_new_tokens.max()),
        )
        return self._planned

    def _query_lens(self, plan: StepPlan, planned: PlannedTokens) -> Int32Array:
        """As planned, but on a CPU, where drafts that are missing are not computed, as they came out."""
        has_drafts = planned.num_tokens > len(plan.rows) and bool((plan.num_new_tokens[: plan.num_decodes] > 1).any())
        if not has_drafts or not self._transfers.is_host:
            return plan.num_new_tokens
        return np.diff(self.buffers.query_starts[: len(plan.rows) + 1].numpy())

    def _view(self, planned: PlannedTokens, lengths: StepLengths) -> StepInputs:
        """Views of the buffers; those of a steady decode differ in its lengths alone."""
        buffers, last, num_tokens = self.buffers, self._views, lengths.num_tokens
        if last is not None and last.rows is planned.rows and last.token_ids.shape[0] == num_tokens:
            return StepInputs(
                last.token_ids, last.positions, last.query_starts, last.seq_lens, last.rows, last.groups, lengths,
                last.extras,
            )  # fmt: skip
        tables = self._rows.block_tables
        self._views = StepInputs(
            token_ids=buffers.token_ids[:num_tokens],
            positions=buffers.positions[:num_tokens],
            query_starts=buffers.query_starts[: len(planned.rows) + 1],
            seq_lens=buffers.seq_lens[: len(planned.rows)],
            rows=planned.rows,
            groups=tuple(
                GroupInputs(table, slots[:num_tokens]) for table, slots in zip(tables, buffers.slots, strict=True)
            ),
            lengths=lengths,
            extras=self._extras,
        )
        return self._views


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the positions, or of the sequences."""

    host_index: Int64Array
    host_rows: Int32Array  # [n]
    index: Tensor  # int64 [n]
    rows: Tensor  # int64 [n]
    is_all: bool

    def of(self, values: Tensor) -> Tensor:
        """The subset's values [n, ...]: all of them themselves, or a copy of some."""
        return values if self.is_all else values[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPositions:
    """Sequence after sequence, in the plan's order; a sequence's positions follow each other."""

    host_rows: Int32Array  # [num_sampled]
    host_tokens: Int64Array  # [num_positions]
    host_sequences: Int64Array  # [num_positions], indices into `host_rows`
    host_offsets: Int64Array  # [num_positions], as `num_earlier`
    requests: Tensor  # int64 [num_sampled]
    rows: Tensor  # int32 [num_sampled]
    starts: Tensor  # int32 [num_sampled + 1]
    draws: Tensor  # bool [num_sampled]; else the core chooses
    tokens: Tensor  # int64 [num_positions], the step's token that is drawn after
    rows_of: Tensor  # int64 [num_positions]
    num_earlier: Tensor  # int64 [num_positions], drafts of the sequence before the position's token is drawn
    places: Tensor  # int64 [num_positions], in [num_sampled, width] end to end
    num_positions: int
    width: int
    """Most positions of a sequence."""
    traits: int
    """All that some of the rows need."""
    drawing: Subset | None
    """Sequences (not positions) that draw; None: all do."""
    random: Subset | None
    penalised: Subset | None
    biased: Subset | None
    min_tokens: Subset | None
    transfers: Transfers
    _wanted: dict[tuple[str, bool], Subset | None] = field(default_factory=dict)

    def tensors(self, after: Tensor, mask: Tensor | None) -> PositionTensors:
        """What kernels read."""
        is_random, has_nucleus = bool(self.traits & Trait.RANDOM), bool(self.traits & Trait.NUCLEUS)
        return PositionTensors(self.rows_of, after, self.num_earlier, mask, is_random, has_nucleus)

    def having(self, name: str, which: BoolArray, *, sequences: bool = False) -> Subset | None:
        """The positions (or sequences) of rows for which `which` [num_rows] is true, and `name` stands; None: there are
        none. Laid out on the first call."""
        key = name, sequences
        if key not in self._wanted:
            rows = self.host_rows if sequences else self.host_rows[self.host_sequences]
            index = np.flatnonzero(which[rows])
            self._wanted[key] = subset(self.transfers, index, rows) if len(index) else None
        return self._wanted[key]


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
        rows_of = rows[sequence]
        draws = ~self._rows.core_chooses[rows]
        width = int(counts.max(initial=1))
        places = sequence * width + num_earlier
        uploaded = self._transfers.upload(
            requests, rows, starts, draws, tokens, rows_of.astype(np.int64), num_earlier, places
        )
        traits = self._rows.sampling.traits_of(rows)
        return SampledPositions(
            host_rows=rows,
            host_tokens=tokens,
            host_sequences=sequence,
            host_offsets=num_earlier,
            requests=uploaded[0],
            rows=uploaded[1],
            starts=uploaded[2],
            draws=uploaded[3],
            tokens=uploaded[4],
            rows_of=uploaded[5],
            num_earlier=uploaded[6],
            places=uploaded[7],
            num_positions=len(tokens),
            width=width,
            traits=traits,
            drawing=None if draws.all() else subset(self._transfers, np.flatnonzero(draws), rows),
            random=self._random(traits, rows_of),
            penalised=self._having(Trait.PENALTIES, traits, rows_of),
            biased=self._having(Trait.LOGIT_BIAS, traits, rows_of),
            min_tokens=self._having(Trait.MIN_TOKENS, traits, rows_of),
            transfers=self._transfers,
        )

    def _random(self, traits: int, rows_of: Int32Array) -> Subset | None:
        """Not of rows that draw nothing."""
        if not traits & Trait.RANDOM:
            return None
        draws = ~self._rows.core_chooses[rows_of]
        index = np.flatnonzero(self._rows.sampling.having(Trait.RANDOM, rows_of) & draws)
        return subset(self._transfers, index, rows_of) if len(index) else None

    def _having(self, trait: int, traits: int, rows_of: Int32Array) -> Subset | None:
        if not traits & trait:
            return None
        return subset(self._transfers, np.flatnonzero(self._rows.sampling.having(trait, rows_of)), rows_of)


def subset(transfers: Transfers, index: Int64Array, rows_of: Int32Array) -> Subset:
    """Those of `rows_of` at these places."""
    rows = rows_of[index]
    on_device, rows_on_device = transfers.upload(index, rows.astype(np.int64))
    return Subset(index, rows, on_device, rows_on_device, is_all=len(index) == len(rows_of))
