"""The operator's metrics and probes over HTTP."""

import asyncio

import aiohttp
import pytest

from kvasir_operator.errors import KvasirOperatorError
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.probes import serving_probes


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


def test_probes_tell_what_is_wrong() -> None:
    async def body() -> None:
        registry = OperatorMetrics().registry
        async with serving_probes("127.0.0.1", 0, registry, lambda: "stuck for 400 s", lambda: None) as port:
            assert await get(port, "/healthz") == (503, "stuck for 400 s")
            assert await get(port, "/readyz") == (200, "ok")

    asyncio.run(body())


def test_metrics_are_served_in_the_prometheus_format() -> None:
    async def body() -> str:
        metrics = OperatorMetrics()
        metrics.count_write("apply", "Deployment")
        metrics.watch_queue(lambda: 3)
        metrics.set_leader(True)
        async with serving_probes("127.0.0.1", 0, metrics.registry, lambda: None, lambda: None) as port:
            return (await get(port, "/metrics"))[1]

    text = asyncio.run(body())
    assert 'kvasir_operator_api_writes_total{kind="Deployment",verb="apply"} 1.0' in text
    assert "kvasir_operator_queue_depth 3.0" in text
    assert "kvasir_operator_leader 1.0" in text


def test_a_port_in_use_is_named() -> None:
    async def body() -> None:
        registry = OperatorMetrics().registry
        async with serving_probes("127.0.0.1", 0, registry, lambda: None, lambda: None) as port:
            with pytest.raises(KvasirOperatorError, match=f"127.0.0.1:{port}: .*--port"):
                async with serving_probes("127.0.0.1", port, registry, lambda: None, lambda: None):
                    pass

    asyncio.run(body())
