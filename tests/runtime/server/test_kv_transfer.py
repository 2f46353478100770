"""`kv_transfer_params` in requests and answers, in the shapes of vLLM's routers."""

import dataclasses
import json
import time
from collections.abc import Iterator

import pytest
from tests.runtime.server.conftest import Running, wait_ready

from kvasir_runtime.config import CacheConfig, KvTransferConfig
from kvasir_runtime.engine.messages import Abort
from kvasir_runtime.server.journal import MAX_JOURNAL_BYTES, ROOM_TO_MOVE_BYTES
from kvasir_runtime.transfer.metrics import TransferStats
from kvasir_runtime.transfer.params import KvTransferParams

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ANSWERED = KvTransferParams(
    do_remote_prefill=True,
    remote_engine_id="e",
    remote_request_id="r",
    remote_block_ids=[4, 5],
    remote_host="10.0.0.1",
    remote_port=5600,
    tp_size=2,
    dcp_size=1,
    pp_size=4,
    remote_num_tokens=32,
    transfer_mode="pull",
)
TO_DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [4, 5],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 4,
    "remote_num_tokens": 32,
    "transfer_mode": "pull",
    "transfer_id": None,
}
COMPLETION = {"prompt": "the quick brown fox", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 1}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def cache_of(**options: str) -> CacheConfig:
    return CacheConfig(kv_transfer_config=KvTransferConfig(kv_connector="NixlConnector", **options))


@pytest.fixture
def server(start_server) -> Iterator[Running]:
    with start_server(cache=cache_of()) as running:
        running.core.kv_transfer_params = ANSWERED
        yield running


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_the_prefill_leg_answers_with_what_decode_is_asked_with(server: Running, route: str, body: dict) -> None:
    answer = server.http.post(route, json=body | {"kv_transfer_params": TO_PREFILL})
    assert answer.json()["kv_transfer_params"] == TO_DECODE
    assert server.core.received[0].spec.kv_transfer_params == KvTransferParams(do_remote_decode=True)


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_the_prefill_leg_is_one_token_whatever_least_number_is_asked_for(
    server: Running, route: str, body: dict
) -> None:
    body = body | {"min_tokens": 2}
    assert server.http.post(route, json=body | {"kv_transfer_params": TO_PREFILL}).status_code == 200
    assert server.core.received[0].spec.sampling.min_tokens == 1
    assert server.http.post(route, json=body | {"kv_transfer_params": TO_DECODE}).status_code == 400


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_stream_brings_it_with_its_last_piece(server: Running, route: str, body: dict) -> None:
    body = body | {"max_tokens": 3, "stream": True, "kv_transfer_params": TO_PREFILL}
    lines = server.http.post(route, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["kv_transfer_params"] == TO_DECODE
    assert not any("kv_transfer_params" in chunk for chunk in chunks[:-1])


def test_the_decode_leg_tells_the_core_where_the_blocks_are(server: Running) -> None:
    foreign = TO_DECODE | {"remote_blocks_expiry_time": 1.5}  # keys of other engines are let pass
    assert server.http.post("/v1/completions", json=COMPLETION | {"kv_transfer_params": foreign}).status_code == 200
    params = server.core.received[0].spec.kv_transfer_params
    assert params is not None
    assert (params.remote_host, params.remote_port, params.remote_key) == ("10.0.0.1", 5600, "r")


def test_both_legs_at_once_share_an_id(server: Running) -> None:
    params = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 5600, "transfer_id": "t"}
    server.http.post("/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
    server.http.post("/v1/completions", json=COMPLETION | {"kv_transfer_params": TO_PREFILL | {"transfer_id": "t"}})
    decode, prefill = (request.spec.kv_transfer_params for request in server.core.received)
    assert (decode.remote_key, prefill.transfer_id) == ("t", "t")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False, "do_remote_decode": False}])
def test_nothing_asked_for_is_nothing(server: Running, params: dict | None) -> None:
    server.core.kv_transfer_params = None
    answer = server.http.post("/v1/completions", json=COMPLETION | {"kv_transfer_params": params}).json()
    assert "kv_transfer_params" not in answer
    assert server.core.received[0].spec.kv_transfer_params is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "needs remote_host and remote_port"),
        ({"kv_transfer_params": TO_DECODE | {"remote_port": 0}}, "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": TO_PREFILL, "prompt": ["a", "b"]}, "belongs to one prompt, but 2 were given"),
    ],
)
def test_what_cannot_be_meant_is_refused(server: Running, change: dict, says: str) -> None:
    answer = server.http.post("/v1/completions", json=COMPLETION | change)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("cache", "params", "says"),
    [
        (CacheConfig(), TO_PREFILL, "start it with --kv-transfer-config"),
        (cache_of(kv_role="kv_consumer"), TO_PREFILL, "kv_consumer"),
        (cache_of(kv_role="kv_producer"), TO_DECODE, "kv_producer"),
    ],
)
def test_a_server_does_what_its_role_is(start_server, cache: CacheConfig, params: dict, says: str) -> None:
    with start_server(cache=cache) as running:
        answer = running.http.post("/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize("params", [TO_PREFILL, TO_DECODE, {"remote_host": "10.0.0.7", "remote_port": 22}])
def test_with_a_secret_set_only_who_shows_it_says_whom_to_exchange_kv_with(
    start_server, monkeypatch: pytest.MonkeyPatch, params: dict
) -> None:
    monkeypatch.setenv("KVASIR_ROUTER_SECRET", "s3cret")
    with start_server(cache=cache_of()) as running:
        for route, body in ROUTES:
            body = body | {"kv_transfer_params": params}
            refused = running.http.post(route, json=body, headers={"x-kvasir-router-secret": "s3cre"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_router")
            assert "--kv-transfer-trust-clients" in refused.json()["error"]["message"]
            assert running.core.received == []
        assert running.http.post(route, json=body | {"kv_transfer_params": {}}).status_code == 200
        assert running.http.post(route, json=body, headers={"x-kvasir-router-secret": "s3cret"}).status_code == 200
        assert [request.spec.kv_transfer_params is None for request in running.core.received] == [True, False]


def test_a_server_that_is_told_to_lets_anyone_say_whom_to_exchange_kv_with(
    start_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_ROUTER_SECRET", "s3cret")
    cache = dataclasses.replace(cache_of(), kv_transfer_trust_clients=True)
    with start_server(cache=cache) as running:
        for params in (TO_PREFILL, TO_DECODE):
            for route, body in ROUTES:
                assert running.http.post(route, json=body | {"kv_transfer_params": params}).status_code == 200
        assert [request.spec.kv_transfer_params is None for request in running.core.received] == [False] * 4


def test_drain_tells_of_blocks_that_other_engines_have_yet_to_read(server: Running) -> None:
    wait_ready(server.http)
    server.core.tell_stats(transfers=TransferStats(num_leased_blocks=3))
    wait_leased(server, 3)


def wait_leased(server: Running, num_blocks: int) -> None:
    deadline = time.monotonic() + 5
    while server.http.get("/drain").json()["leased_blocks"] != num_blocks:
        assert time.monotonic() < deadline, "nothing was told of them"


STREAM = {"prompt": "the quick brown fox", "max_tokens": 40, "stream": True, "ignore_eos": True}
KEEP = {"x-kvasir-resumable": "1"}


def moved_stream(
    server: Running, body: dict, headers: dict[str, str], named: str | None = None, journal: str = ""
) -> str:
    """What is left of a stream when streams are told to leave after its first event. `named`: the one so called."""
    server.core.step_seconds, server.core.kv_transfer_params = 0.01, None
    own = json.dumps(body)
    if journal:
        headers = headers | {"x-kvasir-journal-at": str(len(own))}
    with server.http.stream("POST", "/v1/completions", content=own + journal, headers=headers) as answer:
        lines = answer.iter_lines()
        begun = [next(lines) for _ in range(4)]
        server.core.is_hanging = True  # lest a slow test finds the stream at its end
        if named is None:
            assert server.http.post("/migrate").status_code == 202
        else:
            assert server.http.post("/migrate/request", json={"request_id": named}).status_code == 202
        server.core.is_hanging = False
        return "\n".join([*begun, *lines]) + "\n"


def test_a_stream_that_can_go_on_elsewhere_ends_with_where_its_blocks_are(server: Running) -> None:
    left = moved_stream(server, STREAM, KEEP)
    assert "[DONE]" not in left
    server.core.wait_until(lambda core: core.aborted == [Abort(core.received[0].request_id, is_kept=True)])
    lines = "".join(f"{line.removeprefix(': kvasir ')}\n" for line in left.splitlines() if line.startswith(":"))
    content = json.dumps(STREAM)
    headers = KEEP | {"x-kvasir-journal-at": str(len(content))}
    rest = server.http.post("/v1/completions", content=content + lines, headers=headers)
    assert rest.text.endswith("data: [DONE]\n\n")
    assert server.core.received[1].spec.kv_transfer_params == KvTransferParams(
        do_remote_prefill=True,
        remote_host="10.0.0.9",
        remote_port=5601,
        transfer_id=server.core.received[0].request_id,
    )


@pytest.mark.parametrize(("named", "leaves"), [("one\xe9", True), ("one", False)])
def test_only_the_stream_that_is_named_leaves(server: Running, named: str, leaves: bool) -> None:
    left = moved_stream(server, STREAM, KEEP | {"x-request-id": "one\xe9".encode("latin-1")}, named)
    assert ("10.0.0.9" in left, left.rstrip().endswith("[DONE]")) == (leaves, not leaves)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"request_id": 1}', b'{"request_id": "a", "b": 1}', b"\xff"])
def test_who_names_no_stream_moves_none(server: Running, content: bytes) -> None:
    answer = server.http.post("/migrate/request", content=content)
    assert (answer.status_code, "request_id" in answer.json()["error"]["message"]) == (400, True)


def test_a_stream_of_several_sequences_leaves_without_its_blocks(server: Running) -> None:
    left = moved_stream(server, STREAM | {"n": 2}, KEEP)
    assert "10.0.0.9" not in left
    server.core.wait_until(lambda core: core.aborted == [Abort(core.received[0].request_id)])


@pytest.mark.parametrize("has_room", [True, False])
def test_a_stream_whose_journal_has_no_room_to_say_where_its_blocks_are_leaves_without_them(
    server: Running, has_room: bool
) -> None:
    """It was continued with a journal that others made long."""
    beginning = {"request_id": "r", "created": 0, "seeds": [7], "model": server.model_digest}
    num_bytes = MAX_JOURNAL_BYTES - ROOM_TO_MOVE_BYTES - (8192 if has_room else 0)
    journal = f"{json.dumps(beginning)}\n[0,{' ' * num_bytes}[]]\n"
    assert ("10.0.0.9" in moved_stream(server, STREAM, KEEP, journal=journal)) == has_room
    server.core.wait_until(lambda core: core.aborted == [Abort(core.received[0].request_id, is_kept=has_room)])


def test_a_stream_that_nobody_can_continue_stays(server: Running) -> None:
    assert moved_stream(server, STREAM, {}).rstrip().endswith("[DONE]")
    assert server.core.aborted == []


def test_a_server_that_exchanges_no_kv_keeps_its_streams(running: Running) -> None:
    assert running.http.post("/migrate").status_code == 409


def test_a_server_that_stops_waits_until_others_have_the_blocks(server: Running) -> None:
    moved_stream(server, STREAM, KEEP)
    server.core.wait_until(lambda core: core.aborted != [])  # no step comes any more, which would tell of no blocks
    server.core.tell_stats(transfers=TransferStats(num_leased_blocks=1))
    wait_leased(server, 1)
    server.stop()
    for transfers in (
        TransferStats(),  # from before the core has heard that it is to keep some
        TransferStats(num_requests_kept=1, num_leased_blocks=1),
    ):
        server.core.tell_stats(transfers=transfers)
        server.thread.join(0.2)
        assert server.thread.is_alive()
    server.core.tell_stats(transfers=TransferStats(num_requests_kept=1))
    server.thread.join(10)
    assert server.exit_codes == [0]
