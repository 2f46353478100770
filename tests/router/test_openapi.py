"""The router against its own OpenAPI document: random requests by it are answered, or refused in the API's words."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, settings

from kvasir_router import kept_responses, ollama_models
from kvasir_router.config import RouterConfig
from kvasir_router.relay import ollama
from kvasir_router.routes import DIALECTS, HEALTH_PATHS, document
from kvasir_router.server import running

DOCUMENT = document()
for path in (*DIALECTS, *ollama.PATHS):
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body["properties"] = {
        "model": {"type": "string", "examples": ["tiny"]},  # which the router knows: some requests get to the engine
        "stream": {"type": "boolean"},
        "priority": {"type": "integer"},
    }
schema = schemathesis.openapi.from_dict(DOCUMENT)
# The router, in its thread, draws requests' ids while Hypothesis looks at the same generator.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


async def _answer(request: web.Request) -> web.Response:
    await request.read()
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "tiny"}]})
    return web.json_response({"object": "answer"})


async def _serve(urls: list[str], is_up: threading.Event, stop: asyncio.Event, keys: Path | None) -> None:
    """An engine that answers everything, and a router in front of it."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", _answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        config = RouterConfig(
            port=0, admin_port=0, endpoint=(engine,), probe_interval=0.05, shutdown_timeout=2.0, api_keys_file=keys
        )
        router = await stack.enter_async_context(running(config))
        (service,) = router.services
        async with asyncio.timeout(10):
            while not service.registry.can_place("tiny"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        urls.append(router.url)
        is_up.set()
        await stop.wait()


@contextmanager
def _served(keys: Path | None = None) -> Iterator[str]:
    """Of a router in a thread: the client that sends the requests blocks."""
    urls: list[str] = []
    is_up, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(urls, is_up, stop, keys)))
    thread.start()
    try:
        assert is_up.wait(20)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def router_url() -> Iterator[str]:
    with _served() as url:
        yield url


@pytest.fixture(scope="module")
def closed_router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one that wants a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text('{"sk-1": "blue"}')
    with _served(keys) as url:
        yield url


def check(answer: Any) -> None:
    """The router's own failure is none of them."""
    assert answer.status_code < 500, answer.text
    kind = "application/json" if answer.status_code >= 400 else ("application/json", "application/x-ndjson")
    assert answer.headers["content-type"][0].startswith(kind)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        if not isinstance(error, str):  # as Ollama has it
            assert error["type"]
            error = error["message"]
        assert error


@schema.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_is_answered_or_refused(case: schemathesis.Case, router_url: str) -> None:
    check(case.call(base_url=router_url, timeout=10))


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_of_many_is_answered_or_refused(case: schemathesis.Case, router_url: str) -> None:
    check(case.call(base_url=router_url, timeout=10))


@pytest.mark.parametrize("key", ["sk-1", "sk-2", None])
@schema.parametrize()
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_without_a_known_key_every_answer_is_a_refusal(
    case: schemathesis.Case, key: str | None, closed_router_url: str
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = case.call(base_url=closed_router_url, headers=headers, timeout=10)
    check(answer)
    # Starlette's paths have one line.
    has_route = all("\n" not in unquote(str(each)) for each in (case.path_parameters or {}).values())
    is_open = case.path in ("/openapi.json", *HEALTH_PATHS)
    if has_route and answer.status_code != 405:  # which is said of paths, to everybody
        assert (answer.status_code == 401) == (key != "sk-1" and not is_open)


def test_the_document_is_served_and_names_every_forwarded_path(router_url: str) -> None:
    with urllib.request.urlopen(router_url + "/openapi.json", timeout=10) as answer:
        served = json.load(answer)
    own = {"/openapi.json", "/health", "/ping", "/v1/models", "/v1/models/{name}"}
    assert served["paths"].keys() == {*own, *DIALECTS, *kept_responses.PATHS, *ollama.PATHS, *ollama_models.METHODS}
