"""How parameters change logits before anything is drawn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder

VOCAB_SIZE = 12
Adjust = Callable[..., torch.Tensor]
OTHER: tuple[list[int], int, dict[str, Any]] = ([1, 2, 3, 4], 2, {})
"""A neighbour without parameters."""


@pytest.fixture
def adjust(make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any) -> Adjust:
    """Adjusted logits of requests (tokens, number of prompt tokens, parameters), which may have drafts."""

    def adjust_of(
        logits: torch.Tensor, *requests: tuple[list[int], int, dict[str, Any]], drafts: list[int] | None = None
    ) -> torch.Tensor:
        rows = make_rows(vocab_size=VOCAB_SIZE)
        added = [new_sequence(row, tokens, prompt, **params) for row, (tokens, prompt, params) in enumerate(requests)]
        rows.apply(make_plan(added=added))
        if drafts:
            rows.drafts[:] = torch.tensor(drafts)
        counts = [1 + len(drafts or ())] * len(requests)
        plan = make_plan(decodes=list(enumerate(counts)))
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        after = torch.tensor([len(tokens) - 1 + j for tokens, _, _ in requests for j in range(counts[0])])
        return adjust_logits(logits, rows, positions, after, None)

    return adjust_of


def ones(lines: int = 1) -> torch.Tensor:
    return torch.ones(lines, VOCAB_SIZE)


def changed(adjusted: torch.Tensor) -> dict[int, float]:
    """Token -> logit, where it is not 1 any more."""
    return {token: round(float(adjusted[token]), 4) for token in (adjusted != 1).nonzero().flatten().tolist()}


def test_presence_counts_each_output_token_once(adjust: Adjust) -> None:
    adjusted = adjust(ones(2), ([7, 8, 8, 9], 1, {"presence_penalty": 0.25}), OTHER)
    assert changed(adjusted[0]) == {8: 0.75, 9: 0.75}
    assert changed(adjusted[1]) == {}


def test_frequency_counts_each_output_token_as_often_as_it_occurs(adjust: Adjust) -> None:
    adjusted = adjust(ones(2), OTHER, ([7, 8, 8, 9], 1, {"frequency_penalty": 0.25}))
    assert changed(adjusted[0]) == {}
    assert changed(adjusted[1]) == {8: 0.5, 9: 0.75}


def test_repetition_divides_positive_logits_of_prompt_and_output_once(adjust: Adjust) -> None:
    adjusted = adjust(ones(), ([7, 7, 8, 8], 2, {"repetition_penalty": 2.0}))
    assert changed(adjusted[0]) == {7: 0.5, 8: 0.5}


def test_repetition_multiplies_negative_logits(adjust: Adjust) -> None:
    logits = ones()
    logits[0, [3, 4]] = -1.0
    assert changed(adjust(logits, ([3], 1, {"repetition_penalty": 2.0}))[0]) == {3: -2.0, 4: -1.0}


def test_all_penalties_add_up(adjust: Adjust) -> None:
    params = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    assert changed(adjust(ones(), ([3, 4, 4], 1, params))[0]) == {3: 0.5, 4: 0.5 - 0.25 - 1.0}


def test_a_position_counts_the_drafts_before_it(adjust: Adjust) -> None:
    adjusted = adjust(ones(3), ([3, 4], 1, {"frequency_penalty": 0.25}), drafts=[5, 4])
    assert [changed(line) for line in adjusted] == [{4: 0.75}, {4: 0.75, 5: 0.75}, {4: 0.5, 5: 0.75}]


def test_a_draft_that_is_missing_counts_nothing(adjust: Adjust) -> None:
    adjusted = adjust(ones(3), ([3, 4], 1, {"frequency_penalty": 0.25}), drafts=[-1, -1])
    assert [changed(line) for line in adjusted] == [{4: 0.75}] * 3


def test_logit_bias_is_added_to_the_logit(adjust: Adjust) -> None:
    adjusted = adjust(ones(2), ([3], 1, {"logit_bias": {4: 2.5, 6: -3.0, VOCAB_SIZE: 9.0}}), OTHER)
    assert changed(adjusted[0]) == {4: 3.5, 6: -2.0}
    assert changed(adjusted[1]) == {}


def test_biases_of_different_lengths_share_a_batch(adjust: Adjust) -> None:
    biases: list[dict[int, float]] = [{4: 1.0}, {5: 2.0, 0: 3.0, 7: 4.0}, {6: 5.0, 1: 6.0}]
    adjusted = adjust(ones(3), *(([3], 1, {"logit_bias": bias}) for bias in biases))
    assert [changed(line) for line in adjusted] == [{4: 2.0}, {0: 4.0, 5: 3.0, 7: 5.0}, {1: 7.0, 6: 6.0}]


@pytest.mark.parametrize(("num_output", "is_forbidden"), [(0, True), (1, True), (2, False)])
def test_stop_tokens_are_forbidden_until_min_tokens_are_out(
    num_output: int, is_forbidden: bool, adjust: Adjust
) -> None:
    params = {"min_tokens": 2, "stop_token_ids": (3, VOCAB_SIZE + 7, 5)}
    adjusted = adjust(ones(2), ([1] * (2 + num_output), 2, params), OTHER)
    assert changed(adjusted[0]) == (dict.fromkeys((3, 5), float("-inf")) if is_forbidden else {})
    assert changed(adjusted[1]) == {}


def test_a_position_after_drafts_counts_them_towards_min_tokens(adjust: Adjust) -> None:
    adjusted = adjust(ones(3), ([1, 1], 1, {"min_tokens": 3, "stop_token_ids": (4,)}), drafts=[7, 8])
    assert [changed(line) for line in adjusted] == [{4: float("-inf")}, {4: float("-inf")}, {}]


def test_stop_tokens_of_different_number_share_a_batch(adjust: Adjust) -> None:
    adjusted = adjust(ones(2), *(([1], 1, {"min_tokens": 2, "stop_token_ids": ids}) for ids in ((4,), (5, 6, 7))))
    assert [sorted(changed(line)) for line in adjusted] == [[4], [5, 6, 7]]
