"""What an engine says of itself and what this router knows of its own requests there make one figure."""

import pytest
from msgspec.structs import replace

from kvasir_router.service.load import SCRAPE_LIFETIME_SECONDS, EndpointLoad, InFlight
from kvasir_router.service.load_report import REPORT_LIFETIME_SECONDS, LoadReport
from kvasir_router.service.prefill_rate import FleetPrefill, work

IDLE = LoadReport(
    num_running=0, num_waiting=0, waiting_uncached_tokens=0, running_uncached_tokens=0, kv_used_tokens=0,
    kv_capacity_tokens=1000, steps_per_second=0.0, prefill_tokens_per_second=None, arrived=(), instance="one",
)  # fmt: skip
BUSY = replace(IDLE, num_running=2, waiting_uncached_tokens=300, running_uncached_tokens=40, kv_used_tokens=250)
RATE = 100.0


def load() -> EndpointLoad:
    return EndpointLoad(8, FleetPrefill(RATE).new_member())


def sent(to: EndpointLoad, request_id: str, num_tokens: int, now: float = 0.0, *, cached: int = 0) -> InFlight:
    request = InFlight(request_id, cached, num_tokens, 0)
    to.begin(request, now)
    return request


def seconds(num_tokens: int) -> float:
    return work(num_tokens) / RATE


def test_what_the_engine_reports_is_ahead_of_whatever_comes_next() -> None:
    one = load()
    one.report(BUSY, now=0.0)
    assert (one.prefill_tokens, one.kv_usage, one.kv_capacity_tokens) == (340, 0.25, 1000)
    assert one.queue_seconds(0.0) == pytest.approx(3.4)


def test_own_requests_count_until_the_engine_names_them() -> None:
    one = load()
    sent(one, "x", 100)
    sent(one, "y", 10)
    one.report(BUSY, now=0.0)
    assert one.prefill_tokens == 450
    one.report(replace(BUSY, arrived=("x", "another-routers")), now=0.1)
    assert one.prefill_tokens == 350
    assert one.queue_seconds(0.1) == pytest.approx(3.5, rel=0.01)
    assert one.num_in_flight == 2


@pytest.mark.parametrize("received_tokens", [0, 100])
def test_a_request_whose_prefill_is_over_is_in_the_engines_figures(received_tokens: int) -> None:
    """A peer told of it only after the report that named it."""
    one = load()
    one.report(BUSY, now=0.0)
    request = InFlight("x", 0, 100 - received_tokens, 20, received_tokens, is_peers=True)
    one.begin(request, 0.1)
    assert one.kv_used_tokens == 250 + 120
    one.end_prefill(request, 0.2)
    assert one.kv_used_tokens == 250


def test_a_request_that_is_over_before_it_was_named_counts_no_more() -> None:
    one = load()
    request = sent(one, "x", 100)
    one.report(IDLE, now=0.0)
    one.end(request)
    assert (one.prefill_tokens, one.num_in_flight, one.resident_tokens) == (0, 0, 0)


def test_named_requests_are_not_taken_off_twice() -> None:
    one = load()
    request = sent(one, "x", 100)
    one.report(replace(BUSY, arrived=("x",)), now=0.0)
    one.end_prefill(request)
    one.end(request)
    assert one.prefill_tokens == 340


@pytest.mark.parametrize("work", [{"num_running": 1, "num_waiting": 0}, {"num_running": 0, "num_waiting": 1}])
def test_a_silent_engines_last_word_counts_no_more_while_it_said_that_it_works(work: dict[str, int]) -> None:
    one = load()
    sent(one, "x", 100)
    one.report(replace(BUSY, arrived=("x",), **work), now=0.0)
    one.expire(REPORT_LIFETIME_SECONDS)
    assert one.prefill_tokens == 340
    one.expire(REPORT_LIFETIME_SECONDS + 0.1)
    assert (one.prefill_tokens, one.kv_usage) == (100, None)


@pytest.mark.parametrize(
    ("why", "tokens", "num_receiving", "is_prefilling"),
    [
        ("nothing is computed", {}, 0, False),
        ("another router's prompt waits", {"waiting_uncached_tokens": 1}, 0, True),
        ("another router's prompt is computed", {"running_uncached_tokens": 1}, 0, True),
        ("what the KV of two leaves", {"waiting_uncached_tokens": 128, "running_uncached_tokens": 128}, 2, False),
        ("more than that", {"waiting_uncached_tokens": 128, "running_uncached_tokens": 129}, 2, True),
    ],
)  # fmt: skip
def test_others_prompts_are_known_by_the_engines_word(
    why: str, tokens: dict[str, int], num_receiving: int, is_prefilling: bool
) -> None:
    one = load()
    for number in range(num_receiving):
        one.begin(InFlight(str(number), 0, 0, 0, received_tokens=1000), 0.0)
    assert not one.is_prefilling
    one.report(replace(IDLE, num_running=1, **tokens), now=0.0)
    assert one.is_prefilling is is_prefilling, why
    one.expire(REPORT_LIFETIME_SECONDS + 0.1)
    assert not one.is_prefilling


def test_an_idle_engine_may_be_silent() -> None:
    one = load()
    sent(one, "x", 100)
    one.report(replace(IDLE, arrived=("x",)), now=0.0)
    one.expire(60.0)
    assert one.prefill_tokens == 0


def test_more_waiting_than_was_sent_are_other_routers_and_cost_what_prompts_cost() -> None:
    one = load()
    for request_id in ("x", "y"):
        sent(one, request_id, 100)
    one.scraped(0.5, 2000, num_waiting=1, now=0.0)
    assert (one.kv_usage, one.kv_capacity_tokens, one.queue_seconds(0.0)) == (
        0.5,
        2000,
        pytest.approx(seconds(100) * 2),
    )
    one.scraped(0.5, 2000, num_waiting=4, now=0.0)
    assert one.queue_seconds(0.0) == pytest.approx(seconds(100) * 2 + 3 * one.prefill.work_per_prompt / RATE)


def test_a_failing_scrape_ages() -> None:
    one = load()
    sent(one, "x", 100)
    one.scraped(0.5, 2000, num_waiting=4, now=0.0)
    one.expire(SCRAPE_LIFETIME_SECONDS)
    assert one.kv_usage == 0.5
    one.expire(SCRAPE_LIFETIME_SECONDS + 0.1)
    assert (one.kv_usage, one.queue_seconds(0.0)) == (None, pytest.approx(seconds(100)))


@pytest.mark.parametrize("report", [IDLE, BUSY])
def test_a_report_is_fresh_for_its_lifetime(report: LoadReport) -> None:
    one = load()
    assert not one.has_fresh_report(0.0)
    one.report(report, now=1.0)
    assert one.has_fresh_report(1.0 + REPORT_LIFETIME_SECONDS)
    assert not one.has_fresh_report(1.01 + REPORT_LIFETIME_SECONDS)


def test_what_an_engine_reports_does_not_age_with_an_earlier_scrape() -> None:
    one = load()
    one.scraped(0.9, 1000, 4, now=0.0)
    one.report(IDLE, now=1.0)
    one.expire(now=SCRAPE_LIFETIME_SECONDS + 0.1)
    assert one.kv_usage == 0.0


def test_the_first_prompt_proceeds_with_time_and_the_others_wait_for_it() -> None:
    one = load()
    for request_id in ("x", "y"):
        sent(one, request_id, 100, now=5.0)
    assert one.queue_seconds(5.4) == pytest.approx(2 * seconds(100) - 0.4)
    assert one.queue_seconds(60.0) == pytest.approx(seconds(100))


def test_a_first_token_starts_the_next_prompt() -> None:
    one = load()
    first, _ = (sent(one, request_id, 100) for request_id in ("x", "y"))
    one.end_prefill(first, now=3.0)
    assert one.queue_seconds(3.25) == pytest.approx(seconds(100) - 0.25)


def test_a_prompt_that_overtakes_leaves_the_first_where_it_is() -> None:
    one = load()
    _, second = (sent(one, request_id, 100) for request_id in ("x", "y"))
    one.end_prefill(second, now=0.5)
    assert one.queue_seconds(0.5) == pytest.approx(seconds(100) - 0.5)


def test_a_prompt_taken_to_be_done_was_done_in_its_time() -> None:
    one = load()
    first, _ = (sent(one, request_id, 100) for request_id in ("x", "y"))
    one.end_prefill(first)
    assert one.queue_seconds(1.2) == pytest.approx(2 * seconds(100) - 1.2)


def test_an_idle_engine_starts_at_once() -> None:
    one = load()
    one.end(sent(one, "x", 100, now=0.0))
    sent(one, "y", 100, now=50.0)
    assert one.queue_seconds(50.4) == pytest.approx(seconds(100) - 0.4)


def test_what_the_engine_has_not_received_waits_behind_what_it_reports() -> None:
    one = load()
    one.report(replace(BUSY, waiting_uncached_tokens=0, running_uncached_tokens=100), now=0.0)
    sent(one, "x", 100, now=0.5)
    assert one.queue_seconds(0.5) == pytest.approx(0.5 + seconds(100), rel=0.01)
    assert one.queue_seconds(9.0) == pytest.approx(seconds(100))


def test_reported_tokens_of_own_long_prompts_weigh_as_much_as_these() -> None:
    one = load()
    sent(one, "x", 60_000)
    one.report(replace(BUSY, waiting_uncached_tokens=0, running_uncached_tokens=60_000, arrived=("x",)), now=0.0)
    assert one.queue_seconds(0.0) == pytest.approx(seconds(60_000))
    one.report(replace(BUSY, waiting_uncached_tokens=0, running_uncached_tokens=30_000), now=1.0)
    assert one.queue_seconds(1.0) == pytest.approx(seconds(60_000) / 2)


def test_kv_is_what_the_engine_says_and_what_it_has_not_received() -> None:
    one = load()
    one.report(BUSY, now=0.0)
    sent(one, "x", 100, cached=700)
    assert (one.kv_used_tokens, one.resident_tokens) == (350, 800)


def test_without_reports_kv_is_the_scrape_or_what_own_requests_add_whichever_is_more() -> None:
    one = load()
    sent(one, "x", 100, cached=700)
    assert one.kv_used_tokens == 100
    one.scraped(0.5, 1000, None, now=0.0)
    assert one.kv_used_tokens == 500


def test_two_requests_of_one_id_count_both() -> None:
    one = load()
    first, _ = sent(one, "x", 100), sent(one, "x", 100)
    one.end(first)
    assert one.queue_seconds(0.0) == pytest.approx(seconds(100))


def test_a_request_that_waits_for_kv_holds_up_no_prefill() -> None:
    """It is no head of the queue, behind which others would wait."""
    one = load()
    one.begin(InFlight("waits", 0, 0, 0, received_tokens=500), 0.0)
    sent(one, "next", 100, 1.0)
    assert one.queue_seconds(1.0) == pytest.approx(seconds(100))
    assert one.queue_seconds(1.5) == pytest.approx(seconds(100) - 0.5)


def test_kv_that_is_still_to_come_counts_until_the_engine_names_the_request() -> None:
    one = load()
    one.report(BUSY, now=0.0)
    request = InFlight("waits", 0, 0, 0, received_tokens=500)
    one.begin(request, 0.0)
    assert (one.kv_used_tokens, one.prefill_tokens) == (750, 340)
    one.report(replace(BUSY, kv_used_tokens=750, arrived=("waits",)), now=0.1)
    assert one.kv_used_tokens == 750
    one.end(request)
    assert one.kv_used_tokens == 750


def test_a_request_that_ends_unreported_leaves_nothing() -> None:
    one = load()
    one.report(IDLE, now=0.0)
    request = InFlight("waits", 0, 0, 0, received_tokens=500)
    one.begin(request, 0.0)
    one.end(request)
    assert (one.kv_used_tokens, one.num_in_flight) == (0, 0)


def test_those_who_decode_are_everybodys_by_the_engines_word() -> None:
    one = load()
    sent(one, "own", 10)
    assert one.num_decoding == 0
    one.report(BUSY, now=0.0)
    assert one.num_decoding == 2


def test_own_requests_that_wait_for_kv_are_not_taken_for_others_prompts() -> None:
    one = load()
    sent(one, "usual", 100)  # prompts of others are taken to be as own ones
    request = InFlight("waits", 0, 0, 0, received_tokens=500)
    one.begin(request, 0.0)
    assert one.num_decoding == 0
    one.scraped(None, None, num_waiting=1, now=0.0)
    assert one.queue_seconds(0.0) == pytest.approx(seconds(100))
    one.end_prefill(request, 0.1)
    assert one.num_decoding == 1
    one.scraped(None, None, num_waiting=1, now=0.0)
    assert one.queue_seconds(0.0) > seconds(100)


def test_where_an_engine_exchanges_kv_is_known_as_long_as_its_word_holds() -> None:
    one = load()
    assert one.kv_transfer_port is None
    one.report(replace(IDLE, kv_transfer_port=5600), now=0.0)
    assert one.kv_transfer_port == 5600
    one.forget_report()
    assert one.kv_transfer_port is None
