"""A prefix that many ask for is computed on one endpoint more, once what it has lost pays for that."""

from collections.abc import Sequence

import pytest
from tests.router.parts import a_request, an_endpoint, chatting

from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.prefix_index.approximate import BlockHashes
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

BLOCK = 100
DOCUMENT = tuple(range(20))
CACHED = {"holder": len(DOCUMENT) * BLOCK}


def a_question(number: int, document: tuple[int, ...] = DOCUMENT) -> InferenceRequest:
    """One block behind the document."""
    return a_request(prefix=BlockHashes((len(document) + 1) * BLOCK, (*document, 1000 + number)))


def endpoints(resident_tokens: int = 20_000) -> Sequence[Endpoint]:
    """One stream each: the holder's reads so much in each step, the other's nothing."""
    holder, other = an_endpoint("holder"), an_endpoint("other")
    for number in range(2):  # one makes up for what `an_endpoint` prefills without counting it
        chatting(holder, str(number), cached=resident_tokens // 2, uncached=0, num_output_tokens=0)
        chatting(other, str(number), cached=0, uncached=0, num_output_tokens=0)
    return holder, other


def places(policy: FinishTime, requests: Sequence[InferenceRequest], among: Sequence[Endpoint]) -> list[str]:
    return [policy.place(request, among, CACHED, 0.0).leg.endpoint.url for request in requests]


def test_what_many_ask_for_is_computed_where_it_is_not_cached_once_that_is_paid() -> None:
    """Each loses 0.4 s to the holder's stream, 1.6 s of everybody. The price is 2 s of prefill, twice: one stream
    would stand still meanwhile. The first one asks for what nobody has asked for before."""
    questions = [a_question(number) for number in range(6)]
    expected = ["holder", "holder", "holder", "other", "holder", "holder"]
    assert places(FinishTime(), questions, endpoints(8_000)) == expected


def test_who_loses_half_of_the_price_alone_waits_for_no_others() -> None:
    questions = [a_question(number) for number in range(4)]
    assert places(FinishTime(), questions, endpoints(11_000)) == ["holder", "other", "other", "other"]


def test_who_would_wait_for_a_copy_as_long_as_for_an_own_one_makes_it() -> None:
    """The holder is just computing it."""
    among = an_endpoint("holder", prefill_tokens=1800), an_endpoint("other")
    questions = [a_question(number) for number in range(2)]
    assert places(FinishTime(), questions, among) == ["holder", "other"]


def test_the_busier_the_holder_the_sooner() -> None:
    def num_before(resident_tokens: int) -> int:
        questions = [a_question(number) for number in range(40)]
        return places(FinishTime(), questions, endpoints(resident_tokens)).index("other")

    assert num_before(5_000) > num_before(10_000) > num_before(20_000) > 0


def test_a_conversation_stays_where_it_is() -> None:
    """Its prompts begin alike, and none of them like what was asked for before."""
    policy, placed = FinishTime(), []
    for turn in range(1, 30):
        conversation = a_question(turn, tuple(range(20 * turn)))
        cached = {"holder": 20 * turn * BLOCK}
        placed.append(policy.place(conversation, endpoints(), cached, 0.0).leg.endpoint.url)
    assert set(placed) == {"holder"}


@pytest.mark.parametrize(
    ("why", "among"),
    [
        ("what is cached on both costs nothing more", (an_endpoint("holder"), an_endpoint("other"))),
        ("while all have a queue, everybody would pay", (
            an_endpoint("holder", prefill_tokens=1000), an_endpoint("other", prefill_tokens=1000),
        )),
    ],
)  # fmt: skip
def test_nothing_is_computed_again_where_nothing_is_lost(why: str, among: Sequence[Endpoint]) -> None:
    questions = [a_question(number) for number in range(100)]
    assert set(places(FinishTime(), questions, among)) == {"holder"}, why


def test_what_is_forgotten_has_lost_nothing() -> None:
    policy, among = FinishTime(), endpoints()
    places(policy, [a_question(number) for number in range(2)], among)
    for number in range(5000):
        policy.place(a_question(0, (number + 10_000,)), among, {"holder": BLOCK}, 0.0)
    assert places(policy, [a_question(3)], among) == ["holder"]
