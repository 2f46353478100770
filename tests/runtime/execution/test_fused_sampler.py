"""The compiled sampler draws exactly what its twin of torch operators draws, whatever the logits and parameters."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir_runtime.execution.sampler import draw
from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder
from kvasir_runtime.kernels.step_ops import cpu_step_ops, reference_step_ops

VOCAB_SIZE = 2_500
"""Ten chunks of the kernel, the last one ragged."""
NUM_DRAWS = 200
MOST_TOKENS = 400
FUSED, TWIN = cpu_step_ops(), reference_step_ops(drops_missing_drafts=True)
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharp": {"temperature": 0.01},
    "flat": {"temperature": 2.0},
    "one": {"top_k": 1},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "as many as there are chunks": {"top_k": 10},
    "more than there are chunks": {"top_k": 300, "temperature": 2.0},
    "nucleus": {"top_p": 0.9},
    "wide nucleus": {"top_p": 0.9999, "temperature": 2.0},
    "smallest nucleus": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "only the best": {"min_p": 1.0},
    "hardly any min_p": {"min_p": 1e-20},
    "all three": {"min_p": 0.01, "top_k": 50, "top_p": 0.8, "temperature": 1.3},
}
ADJUSTED: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.37},
    "repetition": {"repetition_penalty": 1.3},
    "unlike repetition": {"repetition_penalty": 0.7, "presence_penalty": -2.0},
    "bias": {"logit_bias": {3: 7.5, 2_499: -100.0, 77: 100.0, 9_999: 100.0}},
    "min_tokens": {"min_tokens": 999, "stop_token_ids": (3, 4, 77, 2_499)},
    "min_tokens reached": {"min_tokens": 2, "stop_token_ids": (3, 4)},
    "all": {
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {3: 7.5, 5: 1.0},
        "min_tokens": 999, "stop_token_ids": (5, 6),
    },
}  # fmt: skip


def logits_of(kind: str) -> Tensor:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB_SIZE, generator=random) * 3
    if kind == "ties":
        return logits.round()
    if kind == "flat":
        return torch.full_like(logits, 2.5)
    if kind == "nearly flat":
        return logits * 0.003
    if kind == "one":
        logits[1_234] = 90.0
    if kind == "mostly impossible":
        logits[40:2_490] = float("-inf")
    if kind == "not a number":
        logits[::3], logits[1::7], logits[5] = float("nan"), float("-inf"), float("inf")
    if kind == "none":
        logits[:] = float("-inf")
    return logits


LOGITS = ("random", "ties", "flat", "nearly flat", "one", "mostly impossible", "not a number", "none")


@pytest.fixture
def drawn(make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any) -> Any:
    """What each way of drawing gives for one sequence at many positions."""

    def draw_both(logits: Tensor, params: dict[str, Any], mask: Tensor | None = None) -> Iterator[list[int]]:
        rows = make_rows(max_model_len=MOST_TOKENS, vocab_size=VOCAB_SIZE, max_drafts=3)
        tokens = (np.arange(MOST_TOKENS) ** 2 % 97).tolist()  # some of them often
        rows.apply(make_plan(added=[new_sequence(0, tokens, 9, **({"temperature": 1.0} | params))]))
        rows.drafts[0] = torch.tensor([5, 5, -1])
        plan = make_plan(decodes=[(0, 3)] * (NUM_DRAWS // 3))
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        number = positions.num_positions
        after = torch.arange(MOST_TOKENS - number, MOST_TOKENS)
        masks = None if mask is None else mask.expand(number, -1)
        for ops in (FUSED, TWIN):
            yield draw(logits.repeat(number, 1), rows, positions, after, ops, mask=masks).tolist()

    return draw_both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("kind", LOGITS)
def test_draws_are_the_twins(kind: str, params: dict[str, Any], dtype: torch.dtype, drawn: Any) -> None:
    """Where one token more or less were kept, most draws would differ."""
    fused, twin = drawn(logits_of(kind).to(dtype), params)
    assert fused == twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", ADJUSTED.values(), ids=ADJUSTED)
@pytest.mark.parametrize("kind", ["random", "ties", "not a number"])
def test_adjusted_draws_are_the_twins(
    kind: str, params: dict[str, Any], temperature: float, dtype: torch.dtype, drawn: Any
) -> None:
    fused, twin = drawn(logits_of(kind).to(dtype), params | {"temperature": temperature, "top_k": 40})
    assert fused == twin


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 5}, {"presence_penalty": 1.0}], ids=str)
def test_masked_draws_are_the_twins(params: dict[str, Any], drawn: Any) -> None:
    random = torch.Generator().manual_seed(0)
    mask = torch.randint(-(2**31), 2**31 - 1, (1, -(-VOCAB_SIZE // 32)), dtype=torch.int32, generator=random)
    mask[0, 3:9], mask[0, 40:60] = 0, -1
    fused, twin = drawn(logits_of("random"), params, mask)
    assert fused == twin
    assert all(mask[0, token // 32] >> token % 32 & 1 for token in fused)


def test_the_last_chunk_may_be_all_there_is(make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any) -> None:
    rows = make_rows(vocab_size=5)
    rows.apply(make_plan(added=[new_sequence(row, [1], temperature=1.0, top_p=0.7) for row in range(4)]))
    plan = make_plan(decodes=[(row, 1) for row in range(4)])
    positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
    logits, after = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)), torch.zeros(4, dtype=torch.int64)
    fused, twin = (draw(logits, rows, positions, after, ops) for ops in (FUSED, TWIN))
    assert torch.equal(fused, twin)
