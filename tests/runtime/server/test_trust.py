"""Who is taken for the router, and what becomes of its headers when others send them."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvasir_runtime.server.middleware import RouterTrustMiddleware, is_loopback
from kvasir_runtime.server.resolving import STRANGER

BODY = {"prompt": "the quick", "max_tokens": 2, "stream": True}
ROUTERS = {"x-kvasir-tenant": "blue", "x-kvasir-resumable": "1"}
SECRET = {"x-kvasir-router-secret": "s3cret"}


async def tell_headers(scope: Any, receive: Any, send: Any) -> None:
    await JSONResponse({**Request(scope).headers, STRANGER: STRANGER in scope})(scope, receive, send)


def ask(
    secret: str | None, peer: str, headers: dict[str, str], path: str = "/", method: str = "GET", **options: bool
) -> httpx.Response:
    """What an application behind the middleware sees of a request from this peer."""
    transport = httpx.ASGITransport(RouterTrustMiddleware(tell_headers, secret, **options), client=(peer, 1234))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(get())


@pytest.mark.parametrize(
    ("secret", "peer", "headers", "is_trusted"),
    [
        (None, "127.0.0.1", {}, True),
        (None, "10.0.0.7", {}, False),
        (None, "10.0.0.7", SECRET, False),
        ("s3cret", "10.0.0.7", SECRET, True),
        ("s3cret", "127.0.0.1", {}, False),
        ("s3cret", "127.0.0.1", {"x-kvasir-router-secret": "s3cre"}, False),
        ("s3cret", "127.0.0.1", {"x-kvasir-router-secret": ""}, False),
        ("s3cret", "127.0.0.1", {"x-kvasir-router-secret": "S3CRET"}, False),
    ],
)
def test_only_the_routers_word_on_tenants_and_journals_counts(secret, peer, headers, is_trusted: bool) -> None:
    seen = ask(secret, peer, headers | ROUTERS | {"x-other": "kept"}).json()
    assert {name: seen[name] for name in ROUTERS if name in seen} == (ROUTERS if is_trusted else {})
    assert seen["x-other"] == "kept"
    assert ask(secret, peer, headers | {"x-kvasir-journal-at": "1"}).status_code == (200 if is_trusted else 403)


@pytest.mark.parametrize(
    ("secret", "peer", "headers", "is_trusted"),
    [
        (None, "127.0.0.1", {}, True),
        (None, "10.0.0.7", {}, False),
        ("s3cret", "10.0.0.7", SECRET, True),
        ("s3cret", "127.0.0.1", {}, False),
    ],
)
def test_only_the_router_names_engines_to_exchange_kv_with_unless_anyone_may(
    secret, peer, headers, is_trusted: bool
) -> None:
    assert ask(secret, peer, headers).json()[STRANGER] is not is_trusted
    assert ask(secret, peer, headers, kv_transfer_trust_clients=True).json()[STRANGER] is False


def test_anyone_who_names_engines_is_not_the_router_for_that() -> None:
    seen = ask("s3cret", "10.0.0.7", ROUTERS, kv_transfer_trust_clients=True).json()
    assert not seen.keys() & ROUTERS.keys()
    for path, headers in (("/", {"x-kvasir-journal-at": "1"}), ("/migrate", {})):
        assert ask("s3cret", "10.0.0.7", headers, path, kv_transfer_trust_clients=True).status_code == 403


@pytest.mark.parametrize("path", ["/migrate", "/migrate/request"])
def test_only_the_router_can_have_streams_leave(path: str) -> None:
    assert ask(None, "127.0.0.1", {}, path).status_code == 200
    refused = ask(None, "10.0.0.7", {}, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_router")


@pytest.mark.parametrize("path", ["/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"])
def test_only_the_router_has_the_engine_do_things_between_requests(path: str) -> None:
    assert ask("s3cret", "10.0.0.7", SECRET, path, "POST").status_code == 200
    for options in ({}, {"kv_transfer_trust_clients": True}):
        refused = ask("s3cret", "10.0.0.7", {}, path, "POST", **options)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_router")


def test_only_the_router_can_have_a_server_drain_and_anyone_may_ask_whether_it_does() -> None:
    assert ask("s3cret", "10.0.0.7", SECRET, "/drain", "POST").status_code == 200
    assert ask(None, "127.0.0.1", {}, "/drain", "POST").status_code == 200
    for options in ({}, {"kv_transfer_trust_clients": True}):
        refused = ask("s3cret", "10.0.0.7", {}, "/drain", "POST", **options)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_the_router")
        assert "KVASIR_ROUTER_SECRET" in refused.json()["error"]["message"]
        assert ask("s3cret", "10.0.0.7", {}, "/drain", **options).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("128.0.0.1", False),
    ],
)
def test_loopback_is_told_in_all_its_spellings(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_with_a_secret_set_a_server_keeps_journals_for_those_who_know_it(
    start_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_ROUTER_SECRET", "s3cret")
    with start_server() as running:
        answers = [running.http.post("/v1/completions", json=BODY, headers=ROUTERS | extra) for extra in ({}, SECRET)]
        tenants = [request.spec.tenant for request in running.core.received]
        assert ["x-kvasir-resumable" in answer.headers for answer in answers] == [False, True]
        assert tenants == ["", "blue"]
        content = json.dumps(BODY).encode()
        forged = running.http.post(
            "/v1/completions", content=content, headers={"x-kvasir-journal-at": str(len(content))}
        )
        assert (forged.status_code, forged.json()["error"]["code"]) == (403, "not_the_router")
