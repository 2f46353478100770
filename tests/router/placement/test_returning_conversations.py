"""An endpoint that is idle between the calls of its conversations is not free for another that would stay as long."""

from collections.abc import Iterator
from itertools import count

import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.prefix_index.approximate import BlockHashes
from kvasir_router.request import InferenceRequest
from kvasir_router.service.load import EndpointLoad, InFlight
from kvasir_router.service.registry import Endpoint

BLOCK = 100


def conversation(names: Iterator[int]) -> Iterator[InferenceRequest]:
    """Its calls, a block longer each."""
    blocks = [next(names) for _ in range(10)]
    while True:
        yield a_request(prefix=BlockHashes(len(blocks) * BLOCK, tuple(blocks)))
        blocks.append(next(names))


def goes_on(policy: FinishTime, num_calls: int = 500) -> None:
    """On one endpoint, which has all of each call but the last block."""
    calls, holder = conversation(count()), an_endpoint("holder")
    for number in range(num_calls):
        policy.place(next(calls), [holder], {"holder": (9 + number) * BLOCK}, 0.0)


def serve(load: EndpointLoad, num_tokens: int, now: float) -> None:
    """A call that is over."""
    call = InFlight("call", 0, num_tokens, 0)
    load.begin(call, now)
    load.end(call)


def two() -> tuple[Endpoint, Endpoint]:
    """Both have one stream now; what is their own in a fleet begins later."""
    return an_endpoint("a", resident_tokens=1000, last_dispatch=1), an_endpoint("b", resident_tokens=1100)


@pytest.mark.parametrize(("do_conversations_return", "expected"), [(True, "b"), (False, "a")])
def test_a_new_conversation_goes_where_fewer_were_in_the_last_minutes(
    do_conversations_return: bool, expected: str
) -> None:
    policy, (busy_of_late, idle_of_late) = FinishTime(), two()
    if do_conversations_return:
        goes_on(policy)
    for _ in range(5):
        serve(busy_of_late.load, 1000, 0.0)
    assert policy.place(a_request(100), [busy_of_late, idle_of_late], {}, 1.0).leg.endpoint.url == expected


def test_what_was_minutes_ago_counts_less() -> None:
    policy, (busy_once, other) = FinishTime(), two()
    goes_on(policy)
    for _ in range(5):
        serve(busy_once.load, 1000, 0.0)
    serve(other.load, 4000, 300.0)
    assert policy.place(a_request(100), [busy_once, other], {}, 300.0).leg.endpoint.url == "a"


def test_many_questions_on_one_document_are_no_conversation() -> None:
    policy, holder, names = FinishTime(), an_endpoint("holder"), count(1000)
    for _ in range(500):
        asked = a_request(prefix=BlockHashes(11 * BLOCK, (*range(10), next(names))))
        policy.place(asked, [holder], {"holder": 10 * BLOCK}, 0.0)
    busy_of_late, idle_of_late = two()
    serve(busy_of_late.load, 5000, 0.0)
    assert policy.place(a_request(100), [busy_of_late, idle_of_late], {}, 1.0).leg.endpoint.url == "a"


def test_what_people_see_is_what_is_compared() -> None:
    policy, (busy_of_late, idle_of_late) = FinishTime(), two()
    goes_on(policy)
    serve(busy_of_late.load, 5000, 0.0)
    costs = policy.costs(a_request(100), [busy_of_late, idle_of_late], {}, 1.0)
    placed = policy.place(a_request(100), [busy_of_late, idle_of_late], {}, 1.0)
    assert costs["a"]["decode_load"] > costs["b"]["decode_load"]
    assert placed.cost_seconds == pytest.approx(sum(costs["b"].values()))
