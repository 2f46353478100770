"""The main path over real sockets: what the client sends arrives untouched, and what the engine answers does too."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.router.parts import Clock
from yarl import URL

from kvasir_router.routes import DIALECTS
from kvasir_router.service.health import ProbeTimes

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
QUICK = {"refresh_seconds": 0.01, "housekeeping_seconds": 0.01}


def chat(text: str = "hi", *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream, **fields}


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_stream_is_relayed_byte_for_byte(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    async with client.post(router.url + CHAT, json=chat(stream=True)) as response:
        assert await response.read() == engine.stream_bytes(5) + b"data: [DONE]\n\n"
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-engine"] == "one"


async def test_an_answer_without_stream_is_the_engines_own(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    bodies = []
    for url in (router.url, engine.url):
        async with client.post(url + CHAT, json=chat()) as response:
            bodies.append((response.status, response.headers["content-type"], await response.read()))
    assert bodies[0] == bodies[1]


async def test_the_engine_gets_the_clients_own_bytes(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    body = b'{ "model":"tiny",\n"messages" : [{"content":"\xc3\xa4", "role":"user"}], "made_up": 1e3 }'
    async with client.post(f"{router.url}{CHAT}?x=%20y", data=body) as response:
        assert response.status == 200
    assert engine.bodies == [body]


async def test_chunks_arrive_as_the_engine_sends_them(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    engine.token_seconds = 3600.0
    async with client.post(router.url + CHAT, json=chat(stream=True)) as response:
        assert await asyncio.wait_for(response.content.readany(), 5) == engine.stream_bytes(1)


async def test_an_engines_error_is_relayed(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    engine.status = 400
    async with client.post(router.url + CHAT, json=chat()) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, "one")


async def test_load_balancers_ask_without_a_key(engine: Any, start_router: Any, client: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"sk-1": "blue"}')
    router = await start_router(engine, api_keys_file=keys)
    for path in ("/health", "/ping"):
        async with client.get(router.url + path) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("path", "fields", "status"), [("/v1/nothing", {}, 404), (CHAT, {"model": "no"}, 404), (CHAT, {"n": -1}, 422)]
)
async def test_what_is_refused_is_logged_with_the_id_that_its_client_is_told(
    path: str, fields: Any, status: int, engine: Any, start_router: Any, client: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    engine.status = 422
    router = await start_router(engine)
    async with client.post(router.url + path, json=chat() | fields) as response:
        request_id = response.headers["x-request-id"]
    assert response.status == status
    [record] = [each for each in caplog.records if hasattr(each, "request_id")]
    assert (record.request_id, record.status) == (request_id, status)


async def test_a_page_that_the_admin_port_does_not_have_names_those_it_has(
    engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    async with client.get(router.admin_url + "/endpoint") as response:
        told = (await response.json())["detail"]
    assert response.status == 404
    assert told.startswith("there is no /endpoint here, but /health, /ready, /metrics, /endpoints, /debug/routing")


async def test_other_paths_are_passed_through(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    for path in DIALECTS:
        async with client.post(router.url + path, json={"model": "tiny", "prompt": [1, 2]}) as response:
            assert response.status == 200, path
    assert engine.paths == list(DIALECTS)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/chat/completions/../load_lora_adapter",
        "/v1/chat/completions%2F..%2Fload_lora_adapter",
        "//v1/chat/completions",
        "/v1/chat",
        "/v1/",
        "/v1",
        "/",
        "/drain",
        "/load",
        "/metrics",
    ],
)
async def test_nothing_else_of_an_engine_can_be_reached(path: str, engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    for method in ("POST", "GET"):
        async with client.request(method, URL(router.url + path, encoded=True), json=chat()) as response:
            assert (response.status, (await error_of(response))["code"]) == (404, "unknown_path")
    assert engine.requests == []


@pytest.mark.parametrize("written", [CHAT + "/", CHAT + "//", "/v1/chat%2Fcompletions", "/%761/chat/completions/"])
async def test_engines_see_a_path_as_it_is_named_here_however_the_client_writes_it(
    written: str, engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    async with client.post(URL(router.url + written + "?a=%2F/", encoded=True), json=chat()) as response:
        assert response.status == 200
    assert engine.paths == [CHAT + "?a=%2F/"]


async def test_models_are_listed_with_a_slash_too(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    for path in ("/v1/models/", "/v1/models/tiny/"):
        async with client.get(router.url + path, allow_redirects=False) as response:
            assert response.status == 200, path


async def test_a_large_body_is_forwarded_whole(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    body = io.BytesIO(json.dumps(chat("x" * 10_000_000)).encode())
    async with client.post(router.url + CHAT, data=body) as response:
        assert response.status == 200
    assert len(engine.requests[0]["messages"][0]["content"]) == 10_000_000


async def test_request_id_and_traceparent_travel_both_ways(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "abc", "traceparent": trace, "authorization": "Bearer engine-key"}
    async with client.post(router.url + CHAT, json=chat(), headers=headers) as response:
        assert response.headers["x-request-id"] == "abc"
    assert engine.headers[0].items() >= headers.items()


async def test_a_request_without_an_id_gets_one(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    async with client.post(router.url + CHAT, json=chat()) as response:
        assert response.headers["x-request-id"] == engine.headers[0]["x-request-id"]


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'{"model": "\xff"}'])
async def test_malformed_json_is_refused_here(body: bytes, engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    async with client.post(router.url + CHAT, data=body) as response:
        assert (response.status, (await error_of(response))["code"]) == (400, "malformed_json")
    assert engine.requests == []


async def test_an_unknown_model_is_refused_with_the_known_ones(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, model="tiny", model_alias=("gpt-4o-mini",))
    async with client.post(router.url + CHAT, json=chat() | {"model": "nope"}) as response:
        error = await error_of(response)
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "tiny, gpt-4o-mini" in error["message"]


async def test_a_body_over_the_limit_is_refused(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, max_body_size=1000)
    async with client.post(router.url + CHAT, json=chat("x" * 2000)) as response:
        assert (response.status, (await error_of(response))["code"]) == (413, "body_too_large")


async def test_a_body_of_unannounced_length_is_bounded_too(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, max_body_size=1000)

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with client.post(router.url + CHAT, data=chunks()) as response:
        assert response.status == 413


async def test_unknown_paths_and_methods_have_openai_errors(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    async with client.get(router.url + "/nope") as response:
        assert (response.status, (await error_of(response))["code"]) == (404, "unknown_path")
    async with client.get(router.url + CHAT) as response:
        assert (response.status, (await error_of(response))["code"]) == (405, "method_not_allowed")


async def test_keys_are_asked_for_where_they_are_set(
    engine: Any, start_router: Any, client: Any, tmp_path: Any
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-1": "blue"}))
    router = await start_router(engine, api_keys_file=keys)
    for path, ask in ((CHAT, client.post), ("/v1/models", client.get)):
        async with ask(router.url + path, headers={"authorization": "Bearer wrong"}) as response:
            assert (response.status, (await error_of(response))["code"]) == (401, "invalid_api_key"), path
    for key in ({"authorization": "Bearer sk-1"}, {"x-api-key": "sk-1"}):
        async with client.post(
            router.url + CHAT, json=chat(), headers={**key, "x-kvasir-tenant": "forged"}
        ) as response:
            assert response.status == 200
        assert engine.headers[-1]["x-kvasir-tenant"] == "blue"
        assert not key.keys() & engine.headers[-1].keys()


FORGED = {
    "x-kvasir-tenant": "forged",
    "x-kvasir-journal-at": "0",
    "x-kvasir-resumable": "1",
    "x-kvasir-router-secret": "guessed",
}


async def test_an_open_router_passes_on_nothing_that_only_a_router_may_say(
    engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    async with client.post(router.url + CHAT, json=chat(), headers=FORGED) as response:
        assert response.status == 200
    assert not FORGED.keys() & engine.headers[0].keys()


async def test_every_request_proves_itself_with_the_routers_secret(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, router_secret="s3")
    for path in (CHAT, "/v1/completions", "/v1/embeddings", "/tokenize"):
        async with client.post(router.url + path, json=chat(), headers=FORGED) as response:
            assert response.status == 200
    assert [headers["x-kvasir-router-secret"] for headers in engine.headers] == ["s3"] * 4
    assert not (FORGED.keys() - {"x-kvasir-router-secret"}) & engine.headers[0].keys()


async def test_a_redirect_is_neither_followed_nor_relayed(engines: Any, start_router: Any, client: Any) -> None:
    engine, elsewhere = engines
    engine.redirect_to = elsewhere.url
    router = await start_router(engine, router_secret="s3")
    async with client.post(router.url + CHAT, json=chat(), allow_redirects=False) as response:
        assert (response.status, (await error_of(response))["code"]) == (502, "endpoint_unreachable")
        assert "location" not in response.headers
        assert elsewhere.url not in await response.text()
    assert elsewhere.requests == []


async def test_where_one_engine_redirects_another_answers(engines: Any, start_router: Any, client: Any) -> None:
    engines[0].redirect_to = "http://nowhere.invalid"
    router = await start_router(*engines, policy="roundRobin")
    for _ in range(2):
        async with client.post(router.url + CHAT, json=chat(), allow_redirects=False) as response:
            assert (response.status, response.headers["x-engine"]) == (200, "two")


async def test_a_revoked_key_is_refused_once_the_keys_were_read_again(
    engine: Any, start_router: Any, client: Any, tmp_path: Any
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-1": "blue"}))
    router = await start_router(engine, api_keys_file=keys, tuned=QUICK)
    keys.write_text(json.dumps({"sk-2": "blue"}))
    async with asyncio.timeout(5):
        while await models_status(client, router, "sk-2") == 401:
            pass
    assert await models_status(client, router, "sk-1") == 401


async def models_status(client: aiohttp.ClientSession, router: Any, key: str) -> int:
    async with client.get(router.url + "/v1/models", headers={"authorization": f"Bearer {key}"}) as response:
        return response.status


@pytest.mark.parametrize(
    "body", [chat("x" * 400_000), chat("x" * 400_000, stream=True), {"model": "tiny", "input": "x" * 400}]
)
async def test_every_whole_answer_teaches_how_fast_its_engine_is(
    body: dict[str, Any], engine: Any, start_router: Any, client: Any
) -> None:
    """A prompt of 100,000 tokens is expected to take longer than the answer took here."""
    router = await start_router(engine)
    path = "/v1/embeddings" if "input" in body else CHAT
    async with client.post(router.url + path, json=body) as response:
        assert response.status == 200
        await response.read()
    (described,) = router.services.describe()
    assert described["num_prefill_observations"] == 1


async def test_an_error_teaches_nothing(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    engine.status = 400
    async with client.post(router.url + CHAT, json=chat("x" * 400_000)) as response:
        assert response.status == 400
    (described,) = router.services.describe()
    assert described["num_prefill_observations"] == 0


async def test_what_is_too_old_is_forgotten_while_the_router_runs(
    engine: Any, start_router: Any, client: Any, until: Any
) -> None:
    """What the engine said of its load, as its service is idle and nobody scrapes it again, how fast it is, and what it
    has cached.
    """
    engine.metrics = "kvasir_kv_cache_usage_ratio 0.5"
    clock = Clock()
    router = await start_router(engine, tuned=QUICK | {"clock": clock, "probes": ProbeTimes(idle_after=0.0)})
    (endpoint,) = router.services.of(None).registry
    async with client.post(router.url + CHAT, json=chat("x" * 4000)) as response:
        await response.read()

    def described() -> tuple[float | None, bool, bool]:
        (one,) = router.services.describe()
        return one["kv_usage"], endpoint.load.prefill.has_evidence, bool(one["prefix_blocks"])

    await until(lambda: described() == (0.5, True, True))
    clock.seconds_ahead = 1e6
    await until(lambda: described() == (None, False, False))


async def test_named_models_are_listed_without_any_endpoint(engine: Any, start_router: Any, client: Any) -> None:
    engine.is_ready = False
    router = await start_router(engine, model="tiny", model_alias=("alias",))
    async with client.get(router.url + "/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("tiny", "tiny"), ("alias", "tiny")]


async def test_each_listed_model_has_a_card_of_its_own(engine: Any, start_router: Any, client: Any) -> None:
    engine.max_model_len = 8192
    router = await start_router(engine, model="tiny", model_alias=("org/alias",))
    for name, root in (("tiny", "tiny"), ("org/alias", "tiny")):
        async with client.get(f"{router.url}/v1/models/{name}") as response:
            card = await response.json()
            assert (card["id"], card["root"], card["max_model_len"]) == (name, root, 8192)
    async with client.get(router.url + "/v1/models/nope") as response:
        assert (response.status, (await error_of(response))["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_see_the_models_own_name_instead_of_an_alias(
    stream: bool, engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine, model="tiny", model_alias=("alias",))
    body = b'{ "stream" : %s,"model":"alias", "seed":1e3, "messages": [ {"content":"\u00e4 \xc3\xa4"} ] }'
    async with client.post(router.url + CHAT, data=body % (b"true" if stream else b"false")) as response:
        assert response.status == 200
    seen = engine.bodies[0]
    assert json.loads(seen)["model"] == "tiny"
    for value in (b'"seed":1e3', b'"messages":[ {"content":"\u00e4 \xc3\xa4"} ]'):
        assert value in seen


async def test_a_request_by_the_models_own_name_keeps_its_bytes_where_there_are_aliases(
    engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine, model="tiny", model_alias=("alias",))
    body = b'{ "model" : "tiny", "messages":[]}'
    async with client.post(router.url + CHAT, data=body) as response:
        assert response.status == 200
    assert engine.bodies == [body]


async def test_a_request_by_an_alias_finds_the_cache_of_the_models_own_name(
    engines: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(*engines, model="tiny", model_alias=("alias",))
    names = []
    for model in ("tiny", "alias", "alias"):
        async with client.post(router.url + CHAT, json=chat("story " * 2000) | {"model": model}) as response:
            names.append(response.headers["x-engine"])
    assert len(set(names)) == 1


async def test_an_adapter_is_listed_and_goes_to_the_engine_that_has_it(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    engines[1].models = ["tiny", "sql"]
    router = await start_router(*engines, model="tiny", policy="roundRobin")
    await until(lambda: "sql" in router.services.of(None).catalog.names())
    async with client.get(router.url + "/v1/models") as response:
        assert [card["id"] for card in (await response.json())["data"]] == ["tiny", "sql"]
    for _ in range(3):
        async with client.post(router.url + CHAT, json=chat() | {"model": "sql"}) as response:
            assert (response.status, response.headers["x-engine"]) == (200, "two")
    engines[1].models = ["tiny"]
    await until(lambda: "sql" not in router.services.of(None).catalog.names())
    async with client.post(router.url + CHAT, json=chat() | {"model": "sql"}) as response:
        assert response.status == 404


async def test_models_are_learned_from_the_engines(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    async with client.get(router.url + "/v1/models/tiny") as response:
        assert (await response.json())["id"] == "tiny"
    async with client.get(router.url + "/v1/models/nope") as response:
        assert response.status == 404


async def test_sixty_four_streams_at_once_are_all_whole(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    for engine in engines:
        engine.num_tokens, engine.token_seconds = 50, 0.001

    async def read() -> bytes:
        async with client.post(router.url + CHAT, json=chat(stream=True)) as response:
            return bytes(await response.read())

    expected = engines[0].stream_bytes(50) + b"data: [DONE]\n\n"
    assert await asyncio.gather(*(read() for _ in range(64))) == [expected] * 64
    assert min(len(engine.requests) for engine in engines) >= 16


async def test_a_conversation_returns_to_the_engine_that_holds_it(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines)
    async with client.post(router.url + CHAT, json=chat("other " * 500)) as first:
        await first.read()
    long = {"role": "user", "content": "story " * 2000}
    names = []
    for turn in range(4):
        messages = [long, *({"role": "user", "content": str(number)} for number in range(turn))]
        async with client.post(router.url + CHAT, json={"model": "tiny", "messages": messages}) as response:
            names.append(response.headers["x-engine"])
    assert len(set(names)) == 1


async def test_a_prompt_without_stream_counts_as_prefill_only_as_long_as_that_should_take(
    engine: Any, start_router: Any, client: Any, until: Any
) -> None:
    """Its first byte comes with its last token, so nothing else tells that its prefill is over."""
    router = await start_router(engine)
    engine.gate.clear()
    answer = asyncio.create_task(client.post(router.url + CHAT, json=chat("story " * 2000)))
    await engine.wait_for_requests(1)
    assert router.services.describe()[0]["prefill_tokens"] > 0
    await until(lambda: router.services.describe()[0]["prefill_tokens"] == 0)
    assert router.services.describe()[0]["num_in_flight"] == 1
    engine.gate.set()
    (await answer).close()


async def test_round_robin_alternates(engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, policy="roundRobin")
    names = []
    for _ in range(4):
        async with client.post(router.url + CHAT, json=chat("same text " * 100)) as response:
            names.append(response.headers["x-engine"])
    assert names in (["one", "two"] * 2, ["two", "one"] * 2)
