"""Requests for vectors and scores are routed, tried again and authenticated as those for text are."""

from typing import Any

import pytest

pytestmark = pytest.mark.anyio
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["one", "other"], "encoding_format": "base64"},
    "/pooling": {"input": [1, 2, 3]},
    "/classify": {"input": "one"},
    "/v1/classify": {"input": "one"},
    "/v1/score": {"text_1": "one", "text_2": ["other"]},
    "/score": {"queries": ["one"], "items": ["other"]},
    "/v1/rerank": {"query": "one", "documents": ["other", {"text": "third"}]},
    "/v2/rerank": {"query": "one", "documents": ["other"]},
    "/rerank": {"query": "one", "documents": ["other"]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_engine_gets_the_bytes_that_the_client_sent(
    path: str, engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    async with client.post(router.url + path, json={"model": "tiny"} | BODIES[path]) as answer:
        assert answer.status == 200
    assert (engine.paths, engine.requests) == ([path], [{"model": "tiny"} | BODIES[path]])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/classify"])
async def test_another_engine_is_asked_where_one_dies(path: str, engines: Any, start_router: Any, client: Any) -> None:
    router = await start_router(*engines, policy="roundRobin")
    engines[0].die_before_headers = True
    for _ in range(len(engines)):  # one of them begins with the engine that dies
        async with client.post(router.url + path, json={"model": "tiny"} | BODIES[path]) as answer:
            assert answer.status == 200
    assert engines[0].paths


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/classify"])
async def test_a_model_that_is_not_served_is_refused(path: str, engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    async with client.post(router.url + path, json={"model": "nope"} | BODIES[path]) as answer:
        assert answer.status == 404
        assert "served are: tiny" in (await answer.json())["error"]["message"]
