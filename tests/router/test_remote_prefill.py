"""A request whose prompt one engine computes and another decodes, as clients, engines and the router's books see it."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, Mock

import aiohttp
import pytest
from tests.router.conftest import MOVE
from tests.router.parts import Clock, a_request, an_endpoint
from tests.router.split_engines import Split

from kvasir_router.endpoints.address import Role
from kvasir_router.errors import UpstreamLostError
from kvasir_router.metrics import Metrics
from kvasir_router.placement.placement import Leg, Placement
from kvasir_router.relay.kv_transfer import HANDOVERS
from kvasir_router.remote_prefill import RemotePrefills
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.load import InFlight

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 100}], "stream": True, "max_tokens": 9}


@pytest.fixture
def split(start_router: Any, exit_stack: Any) -> Split:
    return Split(start_router, exit_stack)


async def ask(client: aiohttp.ClientSession, router: Any, **body: Any) -> tuple[int, bytes]:
    async with client.post(router.url + CHAT, json=BODY | body) as response:
        return response.status, await response.read()


async def metrics(client: aiohttp.ClientSession, router: Any) -> str:
    async with client.get(router.admin_url + "/metrics") as response:
        return await response.text()


def service_of(router: Any) -> Any:
    (service,) = router.services
    return service


def is_free(router: Any) -> bool:
    """Nothing is counted as in flight anywhere."""
    service = service_of(router)
    return not any(
        service.ledger.has_in_flight(endpoint.url) or endpoint.load.num_in_flight or endpoint.load.prefill_tokens
        for endpoint in service.registry
    )


def whole(engine: Any) -> bytes:
    return bytes(engine.stream_bytes(engine.num_tokens) + b"data: [DONE]\n\n")


async def test_both_legs_are_sent_at_once_and_the_client_gets_the_decode_engines_stream(
    split: Split, client: Any
) -> None:
    router = await split.start()
    [prefill], [decode] = split.prefills, split.decodes
    prefill.gate.clear()
    decode.patience_seconds = 5.0
    asked = asyncio.create_task(ask(client, router))
    await asyncio.gather(prefill.wait_for_requests(1), decode.wait_for_requests(1))
    prefill.gate.set()
    assert await asked == (200, whole(decode))
    assert decode.received == [True]


async def test_each_engine_is_told_its_part(split: Split, client: Any) -> None:
    router = await split.start(router_secret="s3")
    await ask(client, router)
    [prefill], [decode] = split.prefills, split.decodes
    [to_prefill], [to_decode] = prefill.requests, decode.requests
    one, other = to_prefill.pop("kv_transfer_params"), to_decode.pop("kv_transfer_params")
    assert to_decode == BODY
    assert to_prefill == BODY | {"stream": False, "max_tokens": 1, "n": 1}
    assert one.pop("transfer_id") == other.pop("transfer_id")
    assert (other["remote_host"], other["remote_port"]) == ("127.0.0.1", 5600)
    assert [headers["x-kvasir-router-secret"] for headers in (*prefill.headers, *decode.headers)] == ["s3", "s3"]
    assert prefill.headers[0]["x-request-id"] == decode.headers[0]["x-request-id"]
    assert "x-kvasir-resumable" not in prefill.headers[0]
    assert decode.bodies[0].startswith(json.dumps(BODY).encode()[:-1])


async def test_an_answer_in_one_piece_comes_from_the_decode_engine(split: Split, client: Any, until: Any) -> None:
    router = await split.start()
    status, body = await ask(client, router, stream=False)
    assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "0 1 2 3 4")
    assert split.decodes[0].received == [True]
    await until(lambda: is_free(router))


async def test_an_idle_decode_engine_prefills_by_itself_where_costs_decide(split: Split, client: Any) -> None:
    router = await split.start(remote_prefill_min_tokens=None)
    assert await ask(client, router) == (200, whole(split.decodes[0]))
    assert (split.prefills[0].requests, split.decodes[0].received) == ([], [None])
    assert split.decodes[0].bodies == [json.dumps(BODY).encode()]
    assert 'kvasir_router_local_prefills_total{reason="cheaper"} 1.0' in await metrics(client, router)


async def test_a_decode_engine_with_prompts_ahead_is_helped(split: Split, client: Any) -> None:
    router = await split.start(remote_prefill_min_tokens=None)
    [endpoint] = service_of(router).registry.serving("tiny")
    endpoint.load.begin(InFlight("another", 0, 10_000, 0), time.perf_counter())
    await ask(client, router)
    assert split.decodes[0].received == [True]
    assert "kvasir_router_remote_prefills_total 1.0" in await metrics(client, router)


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"n": 2}, "unsupported"), ({"messages": BODY["messages"][:1]}, None)],  # type: ignore[index]
)
async def test_several_answers_to_one_prompt_are_not_split(
    body: dict[str, Any], reason: str | None, split: Split, client: Any
) -> None:
    router = await split.start()
    await ask(client, router, **body)
    assert split.decodes[0].received == [None if reason else True]
    if reason:
        assert f'kvasir_router_local_prefills_total{{reason="{reason}"}} 1.0' in await metrics(client, router)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"status": 500}, "500"),
        ({"status": 503}, "503"),
        ({"status": 400}, "400"),
        ({"die_before_headers": True}, "lost"),
    ],
)
async def test_a_prompt_whose_prefill_failed_is_the_decode_engines_at_once(
    trouble: dict[str, Any], reason: str, split: Split, client: Any, until: Any
) -> None:
    router = await split.start()
    for name, value in trouble.items():
        setattr(split.prefills[0], name, value)
    split.decodes[0].patience_seconds = 60.0
    split.channel.is_mute = True
    async with asyncio.timeout(5):  # it waits for no KV that nobody computes
        assert await ask(client, router) == (200, whole(split.decodes[0]))
    assert split.decodes[0].received[-1] is None
    text = await metrics(client, router)
    assert f'kvasir_router_remote_prefill_errors_total{{reason="{reason}"}} 1.0' in text
    assert not re.search(r"kvasir_router_retries_total{.*} (?!0\.0$)", text, re.MULTILINE)
    await until(lambda: is_free(router))


async def test_a_prefill_engine_that_has_failed_is_left_alone_for_a_while(split: Split, client: Any) -> None:
    router = await split.start()
    split.prefills[0].status = 500
    for _ in range(3):
        assert (await ask(client, router))[0] == 200
    assert len(split.prefills[0].requests) == 1
    text = await metrics(client, router)
    assert 'kvasir_router_local_prefills_total{reason="no_prefill_endpoint"} 3.0' in text
    service = service_of(router)
    assert [service.registry.get(engine.url).suspect_until > 0 for engine in (split.prefills[0], split.decodes[0])] == [
        True,
        False,
    ]


async def test_a_prefill_engine_that_refuses_what_another_answers_is_left_alone(split: Split, client: Any) -> None:
    router = await split.start()
    split.prefills[0].status = 404
    for _ in range(3):
        assert (await ask(client, router))[0] == 200
    assert len(split.prefills[0].requests) == 1
    assert service_of(router).registry.get(split.decodes[0].url).suspect_until == 0


@pytest.mark.parametrize("protocol", ["kvasir", "vllm"])
async def test_a_prefill_engine_that_refuses_all_that_others_answer_is_ejected(
    protocol: str, split: Split, client: Any
) -> None:
    router = await split.start(kv_transfer_protocol=protocol)
    [prefill] = split.prefills
    prefill.status = 400
    service = service_of(router)
    for _ in range(6):
        service.registry.get(prefill.url).suspect_until = 0.0  # as if the time were over
        assert (await ask(client, router))[0] == 200
    assert len(prefill.requests) == 5
    assert service.in_flight_limits.circuit(prefill.url) == "open"


@pytest.mark.parametrize("protocol", ["kvasir", "vllm"])
async def test_no_client_makes_a_prefill_engine_a_suspect_by_what_it_asks(
    protocol: str, split: Split, client: Any
) -> None:
    router = await split.start(kv_transfer_protocol=protocol)
    for engine in split.engines:
        engine.status = 400
    for _ in range(3):
        assert (await ask(client, router))[0] == 400
    assert len(split.prefills[0].requests) == 3
    assert service_of(router).registry.get(split.prefills[0].url).suspect_until == 0


async def test_a_prefill_engine_that_is_full_is_left_alone_for_as_long_as_it_says_and_not_ejected(
    split: Split, client: Any
) -> None:
    clock = Clock()
    router = await split.start(tuned={"clock": clock})
    [prefill], service = split.prefills, service_of(router)
    prefill.status, prefill.retry_after = 429, "20"
    for number in range(8):
        for _ in range(2):
            assert (await ask(client, router))[0] == 200
        assert len(prefill.requests) == number + 1
        clock.seconds_ahead += 25.0
    assert service.in_flight_limits.circuit(prefill.url) == "closed"


async def test_a_prefill_engine_is_free_again_once_it_has_answered(split: Split, client: Any, until: Any) -> None:
    router = await split.start()
    [prefill], [decode] = split.prefills, split.decodes
    decode.later_gate.clear()
    asked = asyncio.create_task(ask(client, router))
    registry = service_of(router).registry
    await until(lambda: decode.received and registry.get(prefill.url).load.num_in_flight == 0)
    assert registry.get(decode.url).load.num_in_flight == 1
    decode.later_gate.set()
    assert (await asked)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_whose_prefill_failed_is_ahead_where_it_is_decoded(
    stream: bool, split: Split, client: Any, until: Any
) -> None:
    router = await split.start(kv_transfer_protocol="vllm")
    [prefill], [decode] = split.prefills, split.decodes
    prefill.status = 500
    decode.gate.clear()
    load = service_of(router).registry.get(decode.url).load
    asked = asyncio.create_task(ask(client, router, stream=stream))
    await until(lambda: load.prefill_tokens > 0)
    if not stream:  # nothing will tell: it is taken to last as expected
        await until(lambda: load.prefill_tokens == 0)
    decode.gate.set()
    assert (await asked)[0] == 200
    await until(lambda: is_free(router))


async def test_another_prefill_engine_takes_its_place(split: Split, client: Any) -> None:
    router = await split.start(num_prefills=2)
    first = min(split.prefills, key=lambda engine: engine.url)
    first.status = 500
    for _ in range(4):
        assert (await ask(client, router))[0] == 200
    assert sorted(len(engine.requests) for engine in split.prefills) == [1, 4]
    assert split.decodes[0].received[-3:] == [True, True, True]


async def test_a_decode_engine_is_not_left_for_its_partners_failure(split: Split, client: Any) -> None:
    router = await split.start(num_decodes=2, policy="sessionAffinity")
    split.prefills[0].status = 500
    assert (await ask(client, router))[0] == 200
    assert sorted(len(engine.requests) for engine in split.decodes) == [0, 2]


async def test_a_prompt_is_expected_only_where_it_was_computed_in_the_end(split: Split, client: Any) -> None:
    router = await split.start(num_decodes=2, policy="roundRobin")
    split.prefills[0].status = 500
    await ask(client, router)
    blocks = {one["url"]: one["prefix_blocks"] for one in service_of(router).describe()}
    has_answered = [engine.url for engine in split.decodes if None in engine.received]
    assert [url for url, num_blocks in blocks.items() if num_blocks] == has_answered


async def test_a_prefill_engine_that_is_gone_is_out_until_a_probe_finds_it(split: Split, client: Any) -> None:
    router = await split.start(probe_interval=60.0)
    await split.prefills[0].stop()
    assert await ask(client, router) == (200, whole(split.decodes[0]))
    assert service_of(router).registry.state_of(split.prefills[0].url) == "unreachable"
    assert (await ask(client, router))[0] == 200
    assert split.decodes[0].received[-2:] == [None, None]


async def test_a_prefill_engine_that_is_found_dead_is_not_waited_for(split: Split, client: Any, until: Any) -> None:
    router = await split.start()
    [prefill], [decode] = split.prefills, split.decodes
    prefill.gate.clear()
    decode.patience_seconds = 5.0
    asked = asyncio.create_task(ask(client, router))
    await asyncio.gather(prefill.wait_for_requests(1), decode.wait_for_requests(1))
    service_of(router).ledger.interrupt(prefill.url)
    assert await asked == (200, whole(decode))
    assert 'remote_prefill_errors_total{reason="unresponsive"} 1.0' in await metrics(client, router)


async def test_a_prefill_that_nobody_waits_for_any_more_is_aborted(split: Split, client: Any, until: Any) -> None:
    router = await split.start(tuned={"late_prefill_seconds": 0.02})
    [prefill], [decode] = split.prefills, split.decodes
    prefill.gate.clear()
    decode.later_gate.clear()
    asked = asyncio.create_task(ask(client, router))
    async with asyncio.timeout(5):
        await prefill.aborted.wait()
    decode.later_gate.set()
    assert await asked == (200, whole(decode))
    assert decode.received == [False]
    assert 'remote_prefill_errors_total{reason="late"} 1.0' in await metrics(client, router)
    assert service_of(router).registry.get(prefill.url).suspect_until > 0


async def test_a_decode_engine_that_fails_before_its_first_byte_takes_its_prefill_with_it(
    split: Split, client: Any, until: Any
) -> None:
    router = await split.start(num_decodes=2)
    first, second = sorted(split.decodes, key=lambda engine: engine.url)
    split.prefills[0].gate.clear()
    first.patience_seconds, first.die_before_headers, second.patience_seconds = 0.0, True, 5.0
    asked = asyncio.create_task(ask(client, router))
    await asyncio.gather(split.prefills[0].wait_for_requests(2), second.wait_for_requests(1))
    await split.prefills[0].aborted.wait()
    split.prefills[0].gate.set()
    assert await asked == (200, whole(second))
    assert second.received == [True]
    ids = [request["kv_transfer_params"]["transfer_id"] for request in split.prefills[0].requests]
    assert len(set(ids)) == 2
    await until(lambda: is_free(router))
    text = await metrics(client, router)
    assert not re.search(r"kvasir_router_remote_prefill_errors_total{.*} (?!0\.0$)", text, re.MULTILINE)


async def test_a_stream_that_is_lost_goes_on_with_another_pair(split: Split, client: Any) -> None:
    router = await split.start(num_decodes=2)
    first, second = sorted(split.decodes, key=lambda engine: engine.url)
    first.die_after_tokens = 3
    assert await ask(client, router) == (200, whole(second))
    assert len(split.prefills[0].requests) == 2
    assert second.received == [True]
    assert second.journals == [b"[0]\n[1]\n[2]\n"]
    assert second.requests[0]["messages"] == BODY["messages"]


async def test_a_stream_that_is_moved_is_not_prefilled_again(split: Split, client: Any, until: Any) -> None:
    router = await split.start(num_prefills=2, num_decodes=2)
    first, second = sorted(split.decodes, key=lambda engine: engine.url)
    first.moves_after_tokens = 3
    second.gate.clear()
    asked = asyncio.create_task(ask(client, router))
    await second.wait_for_requests(1)
    load = service_of(router).registry.get(second.url).load
    assert (load.prefill_tokens, load.num_in_flight) == (0, 1), "its KV comes from the first"
    second.gate.set()
    assert await asked == (200, whole(second))
    assert sum(len(engine.requests) for engine in split.prefills) == 1
    assert (first.received, second.received) == ([True], [None])
    assert second.journals == [b"[0]\n[1]\n[2]\n" + MOVE]
    assert load.prefill.num_observations == 0, "it tells nothing of how fast prompts are computed there"
    text = await metrics(client, router)
    assert 'streams_resumed_total{reason="moved"} 1.0' in text
    assert 'streams_resumed_total{reason="broken"} 0.0' in text
    await until(lambda: is_free(router))


async def test_a_moved_stream_that_gets_to_another_revision_is_counted_as_computed_there(
    split: Split, client: Any, until: Any
) -> None:
    router = await split.start(num_decodes=2)
    first, second = sorted(split.decodes, key=lambda engine: engine.url)
    new = service_of(router).registry.get(second.url)
    new.address = replace(new.address, revision="2")
    first.moves_after_tokens = 3
    second.gate.clear()
    asked = asyncio.create_task(ask(client, router))
    await second.wait_for_requests(1)
    assert new.load.prefill_tokens > 0
    second.gate.set()
    assert await asked == (200, whole(second))
    await until(lambda: is_free(router))


async def test_a_prefill_that_fails_as_the_decode_engine_begins_does_not_begin_the_answer_twice() -> None:
    """In the same turn of the loop: the answer cannot go elsewhere any more."""
    failure = asyncio.get_running_loop().create_future()
    pool, job, request = Mock(), MagicMock(), a_request(100)
    pool.post = lambda *arguments: failure
    job.exchange.body.content, job.exchange.headers, job.exchange.path = b"{}", [], "/v1/completions"
    job.exchange.request_id, job.request, job.service.router_secret = "id", request, None
    decode, prefill = an_endpoint("http://d", role=Role.DECODE), an_endpoint("http://p", role=Role.PREFILL)
    placement = Placement(Leg(decode, 0, 0, 100), prefill=Leg(prefill, 0, 100))
    tickets = Ledger(lambda: None).dispatch(request, placement, 0.0)
    async with RemotePrefills(pool, Metrics(), HANDOVERS["kvasir"], 5600).beside(job, placement, tickets) as leg:
        await asyncio.sleep(0)
        failure.set_exception(UpstreamLostError("the prefill engine is gone", "lost"))
        await asyncio.sleep(0)
        assert job.service.note_failure.called
        leg.decode_has_begun(0.0, is_from_start=True)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_both_legs_end_when_the_client_leaves(has_begun: bool, split: Split, client: Any, until: Any) -> None:
    router = await split.start()
    [prefill], [decode] = split.prefills, split.decodes
    (decode.later_gate if has_begun else prefill.gate).clear()
    decode.patience_seconds = 5.0
    async with client.post(router.url + CHAT, json=BODY) if has_begun else aiohttp.ClientSession() as response:
        if has_begun:
            await response.content.readany()
            response.close()
        else:
            asked = asyncio.create_task(response.post(router.url + CHAT, json=BODY))
            await asyncio.gather(prefill.wait_for_requests(1), decode.wait_for_requests(1))
            asked.cancel()
    async with asyncio.timeout(5):
        await decode.aborted.wait()
        if not has_begun:
            await prefill.aborted.wait()
    await until(lambda: is_free(router))


async def test_a_client_may_not_write_kv_transfer_params_where_this_router_does(split: Split, client: Any) -> None:
    router = await split.start()
    status, body = await ask(client, router, kv_transfer_params={"transfer_id": "mine"})
    assert (status, json.loads(body)["error"]["code"]) == (400, "kv_transfer_params_not_allowed")
    assert (await ask(client, router, kv_transfer_params=None))[0] == 200
    assert split.decodes[0].received == [True]


async def test_nor_where_it_does_not_since_engines_may_obey_them(split: Split, start_router: Any, client: Any) -> None:
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_port": 1}
    for router in (await split.start(kv_transfer_port=0), await start_router(split.decodes[0])):
        assert (await ask(client, router, kv_transfer_params=params))[0] == 400
    assert split.decodes[0].requests == []


async def test_requests_wait_while_only_prefill_engines_are_left(split: Split, client: Any, until: Any) -> None:
    router = await split.start(max_queue_wait=0.05)
    split.decodes[0].is_ready = False
    await until(lambda: service_of(router).registry.state_of(split.decodes[0].url) == "not_ready")
    status, body = await ask(client, router)
    assert (status, json.loads(body)["error"]["code"]) == (503, "no_ready_endpoint")
    assert split.prefills[0].requests == []


async def test_a_lone_decode_engine_is_not_ejected_beside_prefill_engines(split: Split, client: Any) -> None:
    router = await split.start(num_prefills=2)
    split.decodes[0].status = 500
    assert [(await ask(client, router))[0] for _ in range(10)] == [500] * 10


async def test_transfers_teach_how_long_the_pair_takes(split: Split, client: Any, until: Any) -> None:
    router = await split.start(tuned={"clock": slow_clock()})
    before = expected_transfer_seconds(split, router)
    await transfer_slowly(split, client, router, until)
    assert expected_transfer_seconds(split, router) > before + 0.2
    assert "kvasir_router_kv_transfer_seconds_count 3.0" in await metrics(client, router)


@pytest.mark.parametrize("is_there_first", [True, False])
async def test_a_wait_for_other_prompts_of_the_decode_engine_teaches_nothing_of_transfers(
    is_there_first: bool, split: Split, client: Any, until: Any
) -> None:
    """Until a remote prefill has ended, or from then on."""
    router = await split.start(tuned={"clock": slow_clock()})
    before = expected_transfer_seconds(split, router)
    load, another = service_of(router).registry.get(split.decodes[0].url).load, InFlight("another", 0, 10, 0)

    def change() -> None:
        if is_there_first:
            load.end_prefill(another)
        else:
            load.begin(another, time.perf_counter())

    if is_there_first:
        load.begin(another, time.perf_counter())
    await transfer_slowly(split, client, router, until, 1, change)
    assert expected_transfer_seconds(split, router) == before


async def test_an_answer_in_one_piece_teaches_nothing_of_transfers(split: Split, client: Any, until: Any) -> None:
    """It comes long after its first token."""
    router = await split.start(tuned={"clock": slow_clock()})
    before = expected_transfer_seconds(split, router)
    await transfer_slowly(split, client, router, until, stream=False)
    assert expected_transfer_seconds(split, router) == before
    assert "kvasir_router_kv_transfer_seconds_count 0.0" in await metrics(client, router)


def slow_clock() -> Clock:
    """By which 0.3 s more pass from the end of a prefill to the first token, which app.py takes the time of."""
    clock = Clock()
    clock.seconds_ahead = -0.3
    return clock


def expected_transfer_seconds(split: Split, router: Any) -> float:
    transfers = service_of(router).pairing.transfers
    return float(transfers.estimate_seconds(split.prefills[0].url, split.decodes[0].url, 1000))


async def transfer_slowly(
    split: Split,
    client: Any,
    router: Any,
    until: Any,
    num_requests: int = 3,
    after_prefill: Callable[[], None] = lambda: None,
    **body: Any,
) -> None:
    """One request after the other."""
    [prefill], [decode] = split.prefills, split.decodes
    prefilling = service_of(router).registry.get(prefill.url).load
    for _ in range(num_requests):
        decode.gate.clear()
        asked = asyncio.create_task(ask(client, router, **body))
        await decode.wait_for_requests(1)
        await until(lambda: prefilling.num_in_flight == 0)
        after_prefill()
        decode.gate.set()
        await asked
        decode.requests.clear()


async def test_the_prefill_engines_rate_is_learned_from_its_own_answer(split: Split, client: Any) -> None:
    router = await split.start()
    await ask(client, router)
    registry = service_of(router).registry
    counts = [
        registry.get(engine.url).load.prefill.num_observations for engine in (split.prefills[0], split.decodes[0])
    ]
    assert counts == [1, 0]


async def test_the_routing_page_has_both_legs_and_what_pairs_would_have_cost(split: Split, client: Any) -> None:
    router = await split.start(num_prefills=2)
    await ask(client, router)
    async with client.get(router.admin_url + "/debug/routing.json") as response:
        [service] = (await response.json())["services"]
    [decision] = service["decisions"]
    assert decision["url"] == split.decodes[0].url
    assert {cost["prefill_url"] for cost in decision["costs"]} == {engine.url for engine in split.prefills}
    [chosen] = [cost for cost in decision["costs"] if cost["prefill_url"] == decision["prefill_url"]]
    assert chosen["cost_seconds"] == pytest.approx(decision["cost_seconds"])
    assert "kv_transfer" in chosen["terms_seconds"]
    assert {replica["role"] for replica in service["replicas"]} == {"prefill", "decode"}


async def test_vllms_engines_are_asked_one_after_the_other(split: Split, client: Any) -> None:
    router = await split.start(kv_transfer_protocol="vllm")
    [prefill], [decode] = split.prefills, split.decodes
    prefill.blocks = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 5}
    prefill.gate.clear()
    asked = asyncio.create_task(ask(client, router))
    await prefill.wait_for_requests(1)
    assert decode.requests == []
    prefill.gate.set()
    assert await asked == (200, whole(decode))
    assert prefill.requests[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.requests[0]["kv_transfer_params"] == prefill.blocks


@pytest.mark.parametrize("trouble", [{"status": 500}, {"blocks": None}])
async def test_vllms_decode_engine_is_told_nothing_where_the_prefill_failed(
    trouble: dict[str, Any], split: Split, client: Any, until: Any
) -> None:
    router = await split.start(kv_transfer_protocol="vllm")
    for name, value in trouble.items():
        setattr(split.prefills[0], name, value)
    assert await ask(client, router) == (200, whole(split.decodes[0]))
    assert split.decodes[0].bodies == [json.dumps(BODY).encode()]
    await until(lambda: is_free(router))
