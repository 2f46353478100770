"""What is drawn from given logits: by each sequence's parameters, in any batch, whatever the logits hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampler import draw
from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder
from kvasir_runtime.kernels.step_ops import StepOps, cpu_step_ops, reference_step_ops

VOCAB_SIZE = 300
OPS = {"compiled": cpu_step_ops(), "torch": reference_step_ops(drops_missing_drafts=True)}
Request = tuple[list[int], int, dict[str, Any]]
"""Tokens, number of prompt tokens, sampling parameters."""
DrawTokens = Callable[..., list[int]]


@pytest.fixture(params=OPS.values(), ids=OPS)
def ops(request: pytest.FixtureRequest) -> StepOps:
    return request.param


@pytest.fixture
def rows_of(make_rows: Any, make_plan: Any, new_sequence: Any) -> Callable[..., Rows]:
    """Rows 0, 1, ... hold the requests."""

    def make(*requests: Request) -> Rows:
        rows = make_rows(max_num_seqs=8, max_model_len=128, vocab_size=VOCAB_SIZE)
        added = [new_sequence(row, tokens, prompt, **params) for row, (tokens, prompt, params) in enumerate(requests)]
        rows.apply(make_plan(added=added))
        return rows

    return make


@pytest.fixture
def draw_tokens(rows_of: Any, make_plan: Any, transfers: Any, ops: StepOps) -> DrawTokens:
    """One token for each request, after its last known one."""

    def draw_after(logits: torch.Tensor, *requests: Request, mask: torch.Tensor | None = None) -> list[int]:
        rows = rows_of(*requests)
        plan = make_plan(decodes=[(row, 1) for row in range(len(requests))])
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        after = torch.tensor([len(tokens) - 1 for tokens, _, _ in requests])
        return draw(logits, rows, positions, after, ops, mask=mask).tolist()

    return draw_after


@pytest.fixture
def draw_often(rows_of: Any, make_plan: Any, transfers: Any, ops: StepOps) -> Callable[..., np.ndarray]:
    """Counts of tokens drawn by one sequence at many positions."""

    def count(logits: torch.Tensor, number: int = 4_000, **params: Any) -> np.ndarray:
        rows = rows_of(([1], 1, {"temperature": 1.0} | params))
        plan = make_plan(decodes=[(0, 1)] * number)
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        many = torch.full((number, VOCAB_SIZE), float("-inf"))
        many[:, : logits.shape[-1]] = logits
        token_ids = draw(many, rows, positions, torch.arange(number), ops)
        return np.bincount(token_ids.numpy(), minlength=VOCAB_SIZE)

    return count


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn((rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(0))


def test_greedy_rows_take_the_most_likely_token(draw_tokens: DrawTokens) -> None:
    logits = random_logits(3)
    assert draw_tokens(logits, *[([1], 1, {})] * 3) == logits.argmax(-1).tolist()


def test_random_draws_follow_the_probabilities(draw_often: Any) -> None:
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[[5, 130, 299]] = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = draw_often(logits)
    np.testing.assert_allclose(counts[[5, 130, 299]] / 4_000, [0.5, 0.3, 0.2], atol=0.03)
    assert counts.sum() == counts[[5, 130, 299]].sum()


def test_temperature_sharpens_the_distribution(draw_often: Any) -> None:
    logits = torch.tensor([0.0, 1.0, -40.0])
    share = draw_often(logits, temperature=0.5)[1] / 4_000
    assert share == pytest.approx(torch.tensor([0.0, 2.0]).softmax(0)[1].item(), abs=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.72}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),  # of what top_k leaves, 0.7 is reached by two tokens
        ({"min_p": 0.24, "top_p": 0.87}, {0, 1, 2, 3}),  # of what min_p leaves
        ({"min_p": 0.3, "top_p": 0.6}, {0, 1}),
    ],
)
def test_filters_keep_only_the_likely_tokens(params: dict[str, Any], kept: set[int], draw_often: Any) -> None:
    logits = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]).log() + torch.tensor([0, 0, 1e-3, 0, -1e-3])
    assert set(np.flatnonzero(draw_often(logits, **params))) == kept


def test_a_request_draws_the_same_token_in_any_batch(draw_tokens: DrawTokens) -> None:
    logits = random_logits(5)
    settings: list[dict[str, Any]] = [{"top_p": 0.9}, {}, {"top_k": 7}, {"min_p": 0.1, "temperature": 0.7}]
    requests: list[Request] = [
        ([1] * (3 + i), 1, {"temperature": 1.0, "seed": 2**40 + i} | params) for i, params in enumerate(settings)
    ]
    together = draw_tokens(logits, *requests[:2], ([1], 1, {}), *requests[2:])
    lines = [0, 1, 3, 4]
    alone = [draw_tokens(logits[line : line + 1], request)[0] for line, request in zip(lines, requests, strict=True)]
    assert [together[line] for line in lines] == alone


def test_greedy_and_random_rows_share_a_batch(draw_tokens: DrawTokens) -> None:
    logits = random_logits(2)
    assert draw_tokens(logits, ([1], 1, {"temperature": 1.0}), ([1], 1, {}))[1] == int(logits[1].argmax())


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logit_bias": {5: 1}}]
)
def test_what_is_not_a_number_is_never_drawn(params: dict[str, Any], draw_tokens: DrawTokens) -> None:
    """And a neighbour's tokens are what they would have been."""
    logits = random_logits(2)
    expected = draw_tokens(logits[1:], ([1], 1, params | {"seed": 1}))
    logits[0] = float("nan")
    logits[0, 299] = 1.0
    assert draw_tokens(logits, ([1], 1, params), ([1], 1, params | {"seed": 1})) == [299, *expected]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"logit_bias": {5: 1}}])
def test_where_nothing_is_a_number_token_0_is_drawn(params: dict[str, Any], draw_tokens: DrawTokens) -> None:
    logits = torch.full((1, VOCAB_SIZE), float("nan"))
    assert draw_tokens(logits, ([1], 1, params)) == [0]


def test_infinity_is_the_most_likely(draw_tokens: DrawTokens) -> None:
    logits = random_logits(1)
    logits[0, 17] = float("inf")
    assert draw_tokens(logits, ([1], 1, {"temperature": 1.0})) == [17]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_a_mask_says_what_may_be_drawn(params: dict[str, Any], draw_tokens: DrawTokens) -> None:
    mask = torch.zeros((1, -(-VOCAB_SIZE // 32)), dtype=torch.int32)
    mask[0, 123 // 32] = 1 << 123 % 32
    assert draw_tokens(random_logits(1), ([1], 1, params), mask=mask) == [123]
