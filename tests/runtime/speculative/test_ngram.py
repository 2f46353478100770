"""Prompt lookup against a plain search."""

import numpy as np
import pytest
import torch
from tests.runtime.speculative.conftest import text_step

from kvasir_runtime.speculative.ngram import NgramProposer, find_continuation


def plain_search(tokens: list[int], min_tokens: int, max_tokens: int) -> int | None:
    for length in range(max_tokens, min_tokens - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return start + length
    return None


@pytest.mark.parametrize("alphabet", [2, 4, 12])
@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_finds_what_a_plain_search_finds(alphabet: int, min_tokens: int, max_tokens: int) -> None:
    rng = np.random.default_rng(alphabet)
    for length in range(1, 60):
        tokens = rng.integers(0, alphabet, length)
        expected = plain_search(tokens.tolist(), min_tokens, max_tokens)
        assert find_continuation(tokens.astype(np.int32), min_tokens, max_tokens) == expected


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    tokens = np.array([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], dtype=np.int32)
    assert find_continuation(tokens, 1, 3) == 3


def test_of_equally_long_matches_the_most_recent_wins() -> None:
    tokens = np.array([1, 2, 5, 1, 2, 6, 1, 2], dtype=np.int32)
    assert find_continuation(tokens, 2, 4) == 5


def test_each_row_gets_the_continuation_of_its_own_match() -> None:
    step = text_step({2: [1, 2, 3, 4, 1, 2], 0: [5, 6, 7]}, num_proposals=3)
    assert NgramProposer(2, 4).propose(step).tolist() == [[3, 4, 1], [-1, -1, -1]]


@pytest.mark.parametrize("period", [[8], [1, 2], [1, 2, 3], [5, 5, 7, 5]])
def test_a_text_that_repeats_itself_is_drafted_in_full(period: list[int]) -> None:
    text = [9, *period * 8][: 3 * len(period) + 2]
    drafts = NgramProposer(2, 4).propose(text_step({0: text}, num_proposals=7)).tolist()
    assert [*text, *drafts[0]] == [9, *period * 12][: len(text) + 7]


def test_drafts_go_on_from_the_match_and_then_from_themselves() -> None:
    rng = np.random.default_rng(0)
    for length in range(6, 40):
        tokens = rng.integers(1, 4, length).astype(np.int32)
        found = find_continuation(tokens, 2, 4)
        (drafts,) = NgramProposer(2, 4).propose(text_step({0: tokens.tolist()}, num_proposals=6)).tolist()
        if found is not None:
            assert drafts == [*tokens, *drafts][found : found + 6]


def test_tokens_behind_the_known_ones_are_not_looked_at() -> None:
    step = text_step({0: [1, 2, 3, 1, 2]}, num_proposals=1)
    step.token_ids[0, 5:8] = torch.tensor([9, 1, 2])
    assert NgramProposer(2, 4).propose(step).tolist() == [[3]]


def test_a_step_in_which_nobody_samples_brings_no_drafts() -> None:
    assert NgramProposer(1, 2).propose(text_step({}, num_proposals=2)).shape == (0, 2)
