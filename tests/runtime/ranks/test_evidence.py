"""Of several signs that a group has failed, which is told as the cause."""

from kvasir_runtime.ranks.evidence import FailureEvidence
from kvasir_runtime.ranks.messages import RankFailed


def test_there_is_none_at_first() -> None:
    assert not FailureEvidence()


def test_a_ranks_own_error_explains_most() -> None:
    evidence = FailureEvidence()
    evidence.add_word(RankFailed(0, "connection closed by peer", is_consequence=True))
    evidence.add_end(0, 1)
    evidence.add_end(1, 1)
    evidence.add_word(RankFailed(1, "no such file", is_consequence=False))
    assert evidence.verdict() == "rank 1: no such file"


def test_a_killed_rank_explains_more_than_its_neighbours_broken_connection() -> None:
    evidence = FailureEvidence()
    evidence.add_word(RankFailed(0, "connection closed by peer", is_consequence=True))
    evidence.add_end(1, -9)
    assert evidence.verdict() == (
        "rank 1 was ended by SIGKILL; if nobody did, the kernel's log says whether it ran out of memory"
    )


def test_a_lost_node_explains_more_than_silence() -> None:
    evidence = FailureEvidence()
    evidence.add_problem("rank 2 has given no sign of life for 6 seconds")
    evidence.add_loss(2)
    assert "rank 2 on another node" in evidence.verdict()


def test_a_broken_connection_is_told_where_nothing_else_is_known() -> None:
    evidence = FailureEvidence()
    evidence.add_word(RankFailed(0, "connection closed by peer", is_consequence=True))
    assert evidence.verdict() == "rank 0: connection closed by peer"


def test_a_rank_that_ended_well_without_a_word_is_told_by_its_status() -> None:
    evidence = FailureEvidence()
    evidence.add_end(1, 0)
    assert evidence.verdict() == "rank 1 ended without a word, with status 0; its log says why"
