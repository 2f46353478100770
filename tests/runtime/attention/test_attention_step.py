"""A backend's step equals attention computed densely in float64, and touches nothing that no token sees."""

from typing import Any

import pytest
import torch
from tests.runtime.attention.conftest import HEAD_DIM, Request, projections, rotary_tables, step_of
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, HeadNorms, LayerCache, StepInputs
from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.kernels.linear_choice import dot_is_faster
from kvasir_runtime.kernels.native import NativeFunction, load_library, observed_by

SCALE = 0.3
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
RUNS = [
    (ReferenceAttention(), torch.float64),
    *((CpuAttention(), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0].name}-{run[1]}")
def run(request: pytest.FixtureRequest) -> tuple[AttentionBackend, torch.dtype]:
    return request.param


def written(cache: LayerCache, inputs: StepInputs, request: int, first: int) -> tuple[Tensor, Tensor]:
    """Keys and values [seq_len - first, num_kv_heads, head_dim] of the positions from `first` on, in float64."""
    block_size = cache.key.shape[1]
    blocks = inputs.groups[cache.group].block_table[inputs.rows[request]].tolist()
    at = [(blocks[p // block_size], p % block_size) for p in range(first, int(inputs.seq_lens[request]))]
    return tuple(torch.stack([x[page, offset].double() for page, offset in at]) for x in (cache.key, cache.value))


def dense(query: Tensor, keys: Tensor, values: Tensor, softcap: float | None) -> Tensor:
    """One token's query [num_heads, head_dim] over all keys [n, num_kv_heads, head_dim] given."""
    group = query.shape[0] // keys.shape[1]
    scores = torch.einsum("hd,khd->hk", query.double(), keys.repeat_interleave(group, 1)) * SCALE
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values.repeat_interleave(group, 1))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (3, 1.0)])
def test_equals_dense_attention_where_all_that_is_not_seen_is_nan(
    run: tuple[AttentionBackend, torch.dtype], window: int | None, softcap: float | None
) -> None:
    backend, dtype = run
    shapes = [(1, 31, 4), (3, 30, 0), (1, 1, 2), (12, 21, 5), (4, 4, 1)]
    inputs, cache = step_of([Request(*shape, window=window) for shape in shapes], dtype)
    query, key, value = projections(inputs.lengths.num_tokens, dtype)
    step = backend.prepare(inputs)
    query = step.rotate_and_write(query, key, value, cache, *rotary_tables(40), None)
    out = step.attend(query, cache, scale=SCALE, window=window, softcap=softcap)
    assert out.is_contiguous()
    token = 0
    for request, (query_len, seq_len, _) in enumerate(shapes):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            keys, values = written(cache, inputs, request, first)
            seen = position + 1 - first
            expected = dense(query[token], keys[:seen], values[:seen], softcap)
            torch.testing.assert_close(out[token].double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
            token += 1


@pytest.mark.parametrize("has_norms", [False, True])
def test_keys_are_normalised_turned_and_stored_in_their_slots(
    run: tuple[AttentionBackend, torch.dtype], has_norms: bool
) -> None:
    backend, dtype = run
    inputs, cache = step_of([Request(1, 9, 3), Request(5, 12, 0)], dtype)
    query, key, value = projections(6, dtype)
    original_query, original_key, original_value = query.clone(), key.clone(), value.clone()
    weights = torch.linspace(0.5, 2, HEAD_DIM).to(dtype), torch.linspace(2, 1, HEAD_DIM).to(dtype)
    norms = HeadNorms(*weights, eps=1e-6) if has_norms else None
    cos, sin = rotary_tables(40)
    turned = backend.prepare(inputs).rotate_and_write(query, key, value, cache, cos, sin, norms)
    for token, slot in enumerate(inputs.groups[1].slots.tolist()):
        place = slot // 4, slot % 4
        position = int(inputs.positions[token])
        for got, x, weight in (
            (turned[token], original_query[token], weights[0]),
            (cache.key[place], original_key[token], weights[1]),
        ):
            x = x.double()
            if has_norms:
                x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
            first, second = x.chunk(2, -1)
            c, s = (table[position].double().chunk(2)[0] for table in (cos, sin))
            expected = torch.cat((first * c - second * s, second * c + first * s), -1)
            tolerance = max(TOLERANCES[dtype], 1e-5)
            torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(cache.value[place], original_value[token])


def test_slots_of_minus_one_are_not_written(run: tuple[AttentionBackend, torch.dtype]) -> None:
    backend, dtype = run
    inputs, cache = step_of([Request(3, 3, 0)], dtype)
    inputs.groups[1].slots[1] = -1
    backend.prepare(inputs).rotate_and_write(*projections(3, dtype), cache, *rotary_tables(4), None)
    page = int(inputs.groups[1].block_table[0, 0])
    assert cache.key[page].isnan().all(-1).all(-1).tolist() == [False, True, False, True]
    assert int((~cache.value.isnan()).any(-1).any(-1).sum()) == 2


class Calls:
    """Of compiled kernels, by name."""

    def __init__(self) -> None:
        self.arguments: dict[str, tuple[Any, ...]] = {}

    def note_call(self, function: NativeFunction, arguments: tuple[Any, ...]) -> None:
        self.arguments[function.name] = arguments

    def keep(self, owner: object) -> None:
        """Nothing is replayed."""

    def refuse(self, problem: str) -> None:
        """Nothing is recorded."""


def test_multiplies_by_dot_products_only_where_they_are_faster() -> None:
    library, calls = load_library(), Calls()
    assert library is not None
    inputs, cache = step_of([Request(1, 3, 0)], torch.bfloat16)
    query, _, _ = projections(1, torch.bfloat16)
    with observed_by(calls):
        CpuAttention().prepare(inputs).attend(query, cache, scale=SCALE, window=None, softcap=None)
    assert bool(calls.arguments["kvasir_attention_plan"][-1]) == dot_is_faster(library)
