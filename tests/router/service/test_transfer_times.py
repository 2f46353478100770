"""What a transfer is expected to take: by pair, as the fleet's where a pair is unknown, and not for ever."""

import pytest

from kvasir_router.service.transfer_times import TransferTimes


def observed(
    times: TransferTimes, prefill: str, decode: str, rate: float, *, now: float = 0.0, count: int = 20
) -> None:
    for _ in range(count):
        times.observe(prefill, decode, 10_000, 0.02 + 10_000 / rate, now)


def test_a_longer_prompt_takes_longer_even_where_nothing_is_known() -> None:
    times = TransferTimes()
    short, long = (times.estimate_seconds("p", "d", num_tokens) for num_tokens in (100, 100_000))
    assert 0 < short < long


def test_each_pair_has_its_own_bandwidth() -> None:
    times = TransferTimes()
    observed(times, "p", "near", 200_000.0)
    observed(times, "p", "far", 5_000.0)
    assert times.estimate_seconds("p", "near", 10_000) == pytest.approx(0.07, rel=0.2)
    assert times.estimate_seconds("p", "far", 10_000) == pytest.approx(2.02, rel=0.2)


def test_an_unknown_pair_is_taken_to_be_like_the_fleet() -> None:
    times = TransferTimes()
    before = times.estimate_seconds("p", "new", 10_000)
    for prefill in ("p", "q"):
        observed(times, prefill, "d", 5_000.0)
    times.refresh({"p", "q", "d", "new"}, 0.0)
    assert times.estimate_seconds("p", "new", 10_000) == pytest.approx(2.02, rel=0.2)
    assert before < 1.0


def test_a_bad_moment_is_forgotten() -> None:
    times = TransferTimes()
    observed(times, "p", "good", 200_000.0)
    observed(times, "q", "good", 200_000.0)
    observed(times, "p", "d", 1_000.0)
    bad = times.estimate_seconds("p", "d", 10_000)
    for minute in range(1, 5):
        for prefill in ("p", "q"):
            observed(times, prefill, "good", 200_000.0, now=60.0 * minute, count=1)
        times.refresh({"p", "q", "d", "good"}, 60.0 * minute)
    assert times.estimate_seconds("p", "d", 10_000) < bad / 5


def test_pairs_of_endpoints_that_are_gone_are_forgotten() -> None:
    times = TransferTimes()
    observed(times, "p", "d", 1_000.0)
    slow = times.estimate_seconds("p", "d", 10_000)
    times.refresh({"p"}, 0.0)
    assert times.estimate_seconds("p", "d", 10_000) < slow / 2
