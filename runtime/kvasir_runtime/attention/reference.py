"""Paged attention in plain torch, one request after the other: the twin that the fast backends are tested against.

It computes in float32, or in float64 where the inputs are, and reads the cache through the block table like the others.
It alone reads a quantised cache.
"""

from dataclasses import dataclass

from torch import Tensor

from kvasir_runtime.attention.backend import HeadNorms, LayerCache, StepInputs
from kvasir_runtime.kernels.paged_attention import paged_attention_reference
from kvasir_runtime.kernels.rowwise import rotate_and_write_reference


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    inputs: StepInputs

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, cos: Tensor, sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:  # fmt: skip
        query_weight, key_weight, eps = (
            (None, None, 0.0) if norms is None else (norms.query_weight, norms.key_weight, norms.eps)
        )
        slots = self.inputs.groups[cache.group].slots
        return rotate_and_write_reference(
            query, key, value, cache.key, cache.value, cos, sin, self.inputs.positions, slots,
            query_weight, key_weight, eps, cache.key_scale, cache.value_scale,
        )  # fmt: skip

    def attend(
        self, query: Tensor, cache: LayerCache, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        inputs = self.inputs
        return paged_attention_reference(
            query, cache.key, cache.value, inputs.query_starts, inputs.seq_lens,
            inputs.groups[cache.group].block_table, inputs.rows, scale, window, softcap,
            query.new_zeros(*query.shape[:2], cache.value.shape[3]), cache.key_scale, cache.value_scale,
        )  # fmt: skip


class ReferenceAttention:
    """Runs on any device and float type."""

    name = "reference"

    def prepare(self, inputs: StepInputs) -> ReferenceStep:
        return ReferenceStep(inputs)
