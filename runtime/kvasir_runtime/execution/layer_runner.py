"""Computes a step's layers on a pipeline stage before the last: rows, inputs, layers.

Nothing is drawn there; of what the last stage drew it hears from the plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS
from kvasir_runtime.execution.kv_buffer import copy_blocks
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.step_features import StepFeature, StepFeatures
from kvasir_runtime.execution.step_inputs import StepInputBuilder
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.models.decoder import ComputeStep
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import StepPlan

DRAWS_NOTHING = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
"""Of every sequence, so that rows keep no parameters."""


class LayerRunner:
    """Owns the rows of one rank, and writes its KV buffer uint8 [num_blocks, page_bytes]."""

    def __init__(
        self,
        *,
        rows: Rows,
        buffer: Tensor,
        compute: ComputeStep,
        ops: StepOps,
        max_num_batched_tokens: int,
        transfers: Transfers,
        features: Sequence[StepFeature] = (),
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        """`features` and `extras` as of `ModelRunner`."""
        self._rows = rows
        self._buffer = buffer
        self._compute = compute
        self._inputs = StepInputBuilder(rows, ops.prepare_inputs, max_num_batched_tokens, transfers, extras)
        self._features = StepFeatures(features, rows)

    @property
    def kv_buffer(self) -> Tensor:
        return self._buffer

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Take over the plan's differences and compute its tokens; lines (stage_buffer) of what leaves the layers."""
        drawless = without_sampling(plan)
        self._rows.apply(drawless)
        self._rows.take_returned(plan)
        self._features.on_rows(drawless)
        if len(plan.block_copies):
            copy_blocks(self._buffer, plan.block_copies)
        inputs = self._inputs.build(plan)
        for feature in self._features.wanted(plan):
            feature.before_decoder(plan, inputs)
        lines = self._compute(inputs, None, captures=plan.num_proposals > 0).hidden
        self._rows.advance_unsampled(plan, inputs.seq_lens)
        return lines


def without_sampling(plan: StepPlan) -> StepPlan:
    """The same plan with parameters that ask for nothing."""
    if not plan.added and not plan.forks:
        return plan
    return msgspec.structs.replace(
        plan,
        added=tuple(replace(new, spec=new.spec.with_sampling(DRAWS_NOTHING), num_candidates=0) for new in plan.added),
        forks=tuple(replace(fork, sampling=DRAWS_NOTHING) for fork in plan.forks),
    )
