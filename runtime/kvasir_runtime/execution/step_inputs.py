"""Makes a step's inputs on the device from the plan and the rows; what has not changed since the last plan is not
uploaded again."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS, GroupInputs, StepInputs
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampling_rows import Int32Array
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.inputs import InputBuffers, PlannedTokens, PrepareInputs, StepLengths
from kvasir_runtime.scheduling.step import StepPlan

PlanKey = tuple[int, bytes, bytes]


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
