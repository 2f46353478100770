"""The attention backend of CPUs: the compiled kernels, or their torch twins where there is no compiler.

A step divides its work once (`AttentionPlan`) for all layers that have equal heads and see equally far back. Work is
cut by request alone, so a result does not depend on the neighbours.
"""

from collections.abc import Callable
from ctypes import CDLL

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, HeadNorms, LayerCache, StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention, ReferenceStep
from kvasir_runtime.kernels.linear import VARIANTS
from kvasir_runtime.kernels.linear_choice import dot_is_faster
from kvasir_runtime.kernels.native import DTYPE_CODES, keep_while_recorded, load_library, warn_of_twin
from kvasir_runtime.kernels.rowwise import cpu_rotate_and_write

MAX_GROUP = 64
"""Query heads that share a key head: rows of one tile."""


class AttentionPlan:
    """The compiled kernel's division of one step's work, for all layers with the same heads and window.

    It reads the tensors given here again in each layer: they must not change meanwhile. Arguments are named as in
    `paged_attention_reference`; `plan_problem` tells what it cannot read. Where the processor has them, AMX tiles and
    bf16 dot products serve bfloat16 of heads that are a multiple of 32 numbers, unless forbidden.
    """

    def __init__(
        self,
        library: CDLL,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        window: int | None,
        use_amx: bool = True,
        use_dot: bool = True,
    ) -> None:
        self._library = library
        self._tensors = (query_starts, seq_lens, block_table, rows)
        use_amx = use_amx and bool(library.kvasir_linear_has(VARIANTS["amx"]))
        use_dot = use_dot and bool(library.kvasir_linear_has(VARIANTS["dot"]))
        self._plan = library.kvasir_attention_plan(
            DTYPE_CODES[query.dtype], query_starts.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(),
            block_table.stride(0), rows.data_ptr(), rows.shape[0], query.shape[1], key_cache.shape[2], query.shape[2],
            key_cache.shape[1], window or 0, use_amx, use_dot,
        )  # fmt: skip
        keep_while_recorded(self)
        library.kvasir_attention_divide(self._plan)

    def __del__(self) -> None:
        self._library.kvasir_attention_free(self._plan)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Fill out [T, Hq, D] for one layer."""
        block_stride, slot_stride, head_stride, _ = key_cache.stride()
        self._library.kvasir_attention(
            self._plan, query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0), key_cache.data_ptr(),
            value_cache.data_ptr(), block_stride, slot_stride, head_stride, scale, softcap or 0.0,
        )  # fmt: skip
        return out


def plan_problem(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> str | None:
    """Why the compiled kernel cannot read these, or None if it can."""
    _, num_heads, head_dim = query.shape
    if query.dtype not in DTYPE_CODES:
        return f"the type is {query.dtype}, expected one of {', '.join(map(str, DTYPE_CODES))}"
    if key_cache.dtype != query.dtype:
        return f"the cache holds {key_cache.dtype}, expected the query's {query.dtype}"
    if head_dim % 8 or num_heads // key_cache.shape[2] > MAX_GROUP:
        return (
            f"heads of {head_dim} numbers, {num_heads} on {key_cache.shape[2]} of keys; expected a multiple of 8, and "
            f"at most {MAX_GROUP} on one"
        )
    if query.stride()[1:] != (head_dim, 1) or key_cache.stride(3) != 1 or key_cache.stride() != value_cache.stride():
        return f"strides are {query.stride()}, {key_cache.stride()} and {value_cache.stride()}, expected adjacent heads"
    return None


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
