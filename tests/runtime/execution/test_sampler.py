from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvasir_runtime.engine.messages import SamplingParams
from kvasir_runtime.execution.input_batch import RequestRows
from kvasir_runtime.execution.sampler import sample
from kvasir_runtime.kernels.argmax import argmax_reference
from kvasir_runtime.scheduling.batch import NewRequest, ScheduledBatch

VOCAB_SIZE = 300
Draw = Callable[..., list[int]]


def rows_of(*requests: tuple[list[int], int, dict[str, Any]]) -> RequestRows:
    """Rows 0, 1, ... hold requests given as (tokens, number of prompt tokens, sampling parameters)."""
    rows = RequestRows(max_num_seqs=64, max_model_len=128, block_size=16, vocab_size=VOCAB_SIZE)
    new = tuple(
        NewRequest(
            str(i), tokens, num_prompt, SamplingParams(**({"max_tokens": 9, "seed": i, "temperature": 0.0} | params))
        )
        for i, (tokens, num_prompt, params) in enumerate(requests)
    )
    rows.apply(ScheduledBatch((), new, (), 0))
    return rows


def draw(logits: torch.Tensor, rows: RequestRows, positions: list[int]) -> list[int]:
    numbers = np.arange(len(positions))
    return sample(logits.clone(), rows, numbers, np.array(positions), argmax_reference).tolist()


def draw_often(logits: torch.Tensor, number: int = 4_000, **params: Any) -> np.ndarray:
    """Counts of tokens drawn by one request at many positions."""
    rows = rows_of(([1], 1, {"temperature": 1.0} | params))
    numbers = np.zeros(number, dtype=np.int64)
    many = logits.repeat(number, 1)
    return np.bincount(
        sample(many, rows, numbers, np.arange(number), argmax_reference).numpy(), minlength=logits.shape[-1]
    )


def test_greedy_rows_take_the_most_likely_token() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    assert draw(logits, rows_of(*[([1], 1, {})] * 3), [1, 1, 1]) == logits.argmax(-1).tolist()


def test_random_draws_follow_the_probabilities() -> None:
    logits = torch.full((VOCAB_SIZE,), -30.0)
    logits[[5, 130, 299]] = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = draw_often(logits)
    np.testing.assert_allclose(counts[[5, 130, 299]] / 4_000, [0.5, 0.3, 0.2], atol=0.03)
    assert counts.sum() == counts[[5, 130, 299]].sum()


def test_temperature_sharpens_the_distribution() -> None:
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
    ],
)
def test_filters_keep_only_the_likely_tokens(params: dict[str, Any], kept: set[int]) -> None:
    counts = draw_often(torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]).log() + torch.tensor([0, 0, 1e-3, 0, -1e-3]), **params)
    assert set(np.flatnonzero(counts)) == kept


def test_equally_likely_tokens_stay_together_under_top_k() -> None:
    counts = draw_often(torch.tensor([2.0, 1.0, 1.0, 0.0]), top_k=2)
    assert set(np.flatnonzero(counts)) == {0, 1, 2}


def test_top_p_of_a_flat_distribution_reaches_beyond_the_sorted_candidates() -> None:
    logits = torch.linspace(0.0, -0.01, VOCAB_SIZE)
    counts = draw_often(logits, top_p=0.9)
    assert np.flatnonzero(counts).max() == pytest.approx(0.9 * VOCAB_SIZE, abs=3)


def test_a_request_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(4, VOCAB_SIZE)
    settings: list[dict[str, Any]] = [{"top_p": 0.9}, {}, {"top_k": 7}, {"min_p": 0.1, "temperature": 0.7}]
    requests = [([1], 1, {"temperature": 1.0, "seed": 11 + i} | params) for i, params in enumerate(settings)]
    together = draw(logits, rows_of(*requests, ([1], 1, {})), [3, 4, 5, 6])
    alone = [draw(logits[i : i + 1], rows_of(requests[i]), [3 + i])[0] for i in range(4)]
    assert together == alone


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    assert draw(logits, rows_of(([1], 1, {"temperature": 1.0}), ([1], 1, {})), [1, 1])[1] == int(logits[1].argmax())


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.4])
    rows = rows_of(([7, 8, 8], 1, {"presence_penalty": 1.0}), ([7, 7, 7, 8], 1, {"frequency_penalty": 0.6}))
    assert draw(logits, rows, [3, 4]) == [7, 7]
    rows = rows_of(([8, 7], 1, {"presence_penalty": 1.5}), ([8, 7, 7, 8], 1, {"frequency_penalty": 0.7}))
    assert draw(logits, rows, [2, 4]) == [8, 7]


def test_repetition_penalty_counts_the_prompt_and_each_token_once() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [7, 8]] = torch.tensor([3.0, 1.0])
    assert draw(logits, rows_of(([7, 7], 2, {"repetition_penalty": 2.9})), [2]) == [7]  # 3 / 2.9 / 2.9 would lose
    assert draw(logits, rows_of(([7], 1, {"repetition_penalty": 3.1})), [1]) == [8]


def test_logit_bias_is_added_and_unknown_ids_are_ignored() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    assert draw(logits, rows_of(([1], 1, {"logit_bias": {42: 5.0, VOCAB_SIZE + 1: 9.0}})), [1]) == [42]


def test_stop_tokens_are_not_sampled_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [3, 4]] = torch.tensor([9.0, 8.0])
    rows = rows_of(([1, 5, 6], 1, {"min_tokens": 2, "stop_token_ids": (3, VOCAB_SIZE + 7)}))
    assert draw(logits, rows, [2]) == [4]
    assert draw(logits, rows, [3]) == [3]
