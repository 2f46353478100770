"""The attention backend of CPUs: the compiled kernels, or their torch twins where there is no compiler.

A step divides its work once (`AttentionPlan`) for all layers that have equal heads and see equally far back.
"""

from collections.abc import Callable
from ctypes import CDLL

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, HeadNorms, LayerCache, StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention, ReferenceStep
from kvasir_runtime.kernels.linear_choice import dot_is_faster
from kvasir_runtime.kernels.native import load_library, warn_of_twin
from kvasir_runtime.kernels.paged_attention import AttentionPlan, plan_problem
from kvasir_runtime.kernels.rowwise import cpu_rotate_and_write


class CpuStep:
    def __init__(self, library: CDLL, rotate_and_write: Callable[..., Tensor], inputs: StepInputs) -> None:
        self.inputs = inputs
        self._library = library
        self._rotate_and_write = rotate_and_write
        self._plans: dict[tuple[object, ...], AttentionPlan | None] = {}
        """By what layers may differ in; None where only the twin can compute it."""

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, cos: Tensor, sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:  # fmt: skip
        weights = (None, None, 0.0) if norms is None else (norms.query_weight, norms.key_weight, norms.eps)
        slots = self.inputs.groups[cache.group].slots
        return self._rotate_and_write(
            query, key, value, cache.key, cache.value, cos, sin, self.inputs.positions, slots, *weights
        )

    def attend(
        self, query: Tensor, cache: LayerCache, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        plan = self._plan(query, cache, window)
        if plan is None:
            return ReferenceStep(self.inputs).attend(query, cache, scale=scale, window=window, softcap=softcap)
        out = torch.empty(query.shape, dtype=query.dtype)
        return plan.attend(query, cache.key, cache.value, scale, softcap, out)

    def _plan(self, query: Tensor, cache: LayerCache, window: int | None) -> AttentionPlan | None:
        kind = (cache.group, window, query.shape, cache.key.shape)
        if kind not in self._plans:
            self._plans[kind] = self._make_plan(query, cache, window)
        return self._plans[kind]

    def _make_plan(self, query: Tensor, cache: LayerCache, window: int | None) -> AttentionPlan | None:
        problem = plan_problem(query, cache.key, cache.value)
        if problem is not None:
            warn_of_twin("attention", problem)
            return None
        inputs, table = self.inputs, self.inputs.groups[cache.group].block_table
        return AttentionPlan(
            self._library, query, cache.key, inputs.query_starts, inputs.seq_lens, table, inputs.rows, window,
            use_dot=dot_is_faster(self._library),
        )  # fmt: skip


class CpuAttention:
    """Holds no state of requests."""

    name = "cpu"

    def __init__(self) -> None:
        self._library = load_library()
        self._rotate_and_write = cpu_rotate_and_write(self._library) if self._library else None

    def prepare(self, inputs: StepInputs) -> AttentionStep:
        if self._library is None or self._rotate_and_write is None:
            return ReferenceAttention().prepare(inputs)
        return CpuStep(self._library, self._rotate_and_write, inputs)
