"""Suffix lookup: drafts of the longest match, by frequency, from a history that stays bounded."""

import pickle

import numpy as np
import pytest
from tests.runtime.speculative.conftest import text_step

from kvasir_runtime.speculative.suffix import SuffixProposer, likely_continuation
from kvasir_runtime.speculative.token_history import TokenHistory


def add_all(history: TokenHistory, tokens: list[int]) -> int:
    place = None
    for token in tokens:
        place = history.add(token, place)
    assert place is not None
    return place


def test_what_followed_most_often_is_drafted() -> None:
    history = TokenHistory(100)
    for last in (7, 8, 7):
        add_all(history, [1, 2, 3, last])
    assert likely_continuation(history, add_all(history, [1, 2, 3]), most=4) == [7]


def test_a_longer_match_counts_more_than_frequency() -> None:
    history = TokenHistory(100)
    add_all(history, [5, 1, 2, 9])
    for _ in range(3):
        add_all(history, [6, 1, 2, 4])
    assert likely_continuation(history, add_all(history, [5, 1, 2]), most=1) == [9]


def test_drafts_end_where_confidence_does() -> None:
    history = TokenHistory(100)
    for last in (4, 5, 6, 7):
        add_all(history, [1, 2, 3, last])
    assert likely_continuation(history, add_all(history, [1, 2]), most=4) == [3]


def test_drafts_are_no_more_than_wanted() -> None:
    history = TokenHistory(100)
    add_all(history, list(range(20)))
    assert likely_continuation(history, add_all(history, [0, 1]), most=5) == [2, 3, 4, 5, 6]


def test_a_new_text_has_no_continuation() -> None:
    history = TokenHistory(100)
    assert likely_continuation(history, add_all(history, [1, 2, 3]), most=4) == []


def test_the_history_forgets_the_oldest_and_stays_bounded() -> None:
    history = TokenHistory(64)
    add_all(history, [1, 2, 3, 4])
    add_all(history, [token % 50 + 10 for token in range(64)])
    assert likely_continuation(history, add_all(history, [1, 2]), most=2) == []
    sizes = []
    for seed in range(10):
        add_all(history, np.random.default_rng(seed).integers(0, 1000, 200).tolist())
        sizes.append(len(pickle.dumps(history)))
    assert len(history) == 64
    assert max(sizes) < 1.1 * min(sizes)


def test_a_text_is_remembered_until_its_last_token_goes() -> None:
    history = TokenHistory(8)
    add_all(history, [1, 2, 3])
    add_all(history, [20, 21, 22])
    assert likely_continuation(history, add_all(history, [1, 2]), most=2) == [3]
    history.add(30, None)
    history.add(31, None)
    assert likely_continuation(history, add_all(history, [1, 2]), most=2) == []


@pytest.mark.parametrize("seed", range(4))
def test_matches_agree_with_a_plain_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history, text = TokenHistory(1000), rng.integers(0, 4, 60).tolist()
    end = add_all(history, text)
    ends = list(history.matches(end, 1000))
    assert ends == [e for e in range(58, 0, -1) if text[e - 1 : e + 1] == text[-2:]]
    for other in ends:
        plain = next((n for n in range(16) if n > other or text[other - n] != text[59 - n]), 16)
        assert history.common_length(end, other, 16) == plain


def test_a_request_finds_its_own_text_again() -> None:
    proposer = SuffixProposer()
    proposer.propose(text_step({0: [1, 2, 3, 4, 5]}, num_proposals=2))
    assert proposer.propose(text_step({0: [1, 2, 3, 4, 5, 2, 3]}, num_proposals=2)).tolist() == [[4, 5]]


def test_a_request_finds_the_text_of_another() -> None:
    proposer = SuffixProposer()
    proposer.propose(text_step({0: [1, 2, 3, 4, 5]}, num_proposals=2))
    assert proposer.propose(text_step({1: [9, 2, 3]}, num_proposals=2)).tolist() == [[4, 5]]


@pytest.mark.parametrize(("owner", "reader"), [(b"a", b"b"), (b"a", None), (None, b"a")])
def test_a_request_finds_no_text_of_another_salt(owner: bytes | None, reader: bytes | None) -> None:
    proposer = SuffixProposer()
    proposer.propose(text_step({0: [1, 2, 3, 4, 5]}, 2, owner))
    assert proposer.propose(text_step({1: [9, 2, 3]}, 2, reader)).tolist() == [[-1, -1]]
    assert proposer.propose(text_step({1: [9, 2, 3, 6, 2, 3]}, 2, reader)).tolist() == [[6, 2]]
    assert proposer.propose(text_step({2: [9, 2, 3]}, 2, owner)).tolist() == [[4, 5]]


def test_a_row_taken_over_by_another_salt_is_not_spliced_to_the_text_that_it_held() -> None:
    """Although the two end alike."""
    proposer = SuffixProposer()
    proposer.propose(text_step({1: [5, 6, 7, 8]}, 2, b"a"))
    proposer.propose(text_step({0: [1, 2, 3, 4, 5, 6]}, 2, b"a"))
    assert proposer.propose(text_step({0: [9, 9, 3, 4, 5, 6]}, 2, b"b")).tolist() == [[-1, -1]]


def test_text_written_in_steps_that_were_not_shown_is_added_later() -> None:
    proposer = SuffixProposer()
    for length in (2, 5):
        proposer.propose(text_step({0: [1, 2, 3, 4, 5][:length]}, num_proposals=1))
    assert proposer.propose(text_step({1: [3, 4]}, num_proposals=2)).tolist() == [[5, -1]]


def test_a_row_is_not_spliced_to_the_sequence_it_held_before() -> None:
    proposer = SuffixProposer()
    proposer.propose(text_step({0: [1, 2, 3]}, num_proposals=1))
    proposer.propose(text_step({0: [7, 8, 9, 6]}, num_proposals=1))
    assert proposer.propose(text_step({1: [2, 3]}, num_proposals=1)).tolist() == [[-1]]
    assert proposer.propose(text_step({1: [7, 8]}, num_proposals=1)).tolist() == [[9]]


def test_of_a_long_prompt_the_end_is_remembered() -> None:
    proposer = SuffixProposer(history_tokens=64)
    proposer.propose(text_step({0: list(range(60))}, num_proposals=1))
    assert proposer.propose(text_step({2: [40, 41]}, num_proposals=1)).tolist() == [[-1]]
    assert proposer.propose(text_step({1: [57, 58]}, num_proposals=1)).tolist() == [[59]]
