"""The operator's metrics and probes over HTTP."""

import asyncio
import socket

import aiohttp
import pytest
from tests.operator.cluster_objects import service

from kvasir_operator.errors import KubeForbiddenError, KvasirOperatorError
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.probes import serving_probes


async def get(address: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as answer:
        return answer.status, await answer.text()


def test_probes_tell_what_is_wrong() -> None:
    async def body() -> None:
        registry = OperatorMetrics().registry
        async with serving_probes("127.0.0.1", 0, registry, lambda: "stuck for 400 s", lambda: None) as address:
            assert await get(address, "/healthz") == (503, "stuck for 400 s")
            assert await get(address, "/readyz") == (200, "ok")

    asyncio.run(body())


def test_metrics_are_served_in_the_prometheus_format() -> None:
    async def body() -> str:
        metrics = OperatorMetrics()
        metrics.count_request("apply", "Deployment", None)
        metrics.count_request("apply", "Deployment", KubeForbiddenError("quota"))
        metrics.watch_queue(lambda: 3, lambda: 7.5)
        metrics.set_leader(True)
        async with serving_probes("127.0.0.1", 0, metrics.registry, lambda: None, lambda: None) as address:
            return (await get(address, "/metrics"))[1]

    text = asyncio.run(body())
    requests = 'kvasir_operator_api_requests_total{kind="Deployment",result="%s",verb="apply"} 1.0'
    assert requests % "success" in text
    assert requests % "KubeForbiddenError" in text
    assert "kvasir_operator_queue_depth 3.0" in text
    assert "kvasir_operator_queue_longest_wait_seconds 7.5" in text
    assert "kvasir_operator_leader 1.0" in text


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("kvasir_operator_leader", "kvasir_operator_leader 1.0"),
        (
            "kvasir_operator_service_phase",
            'kvasir_operator_service_phase{inference_service="llama",phase="Ready",service_namespace="models"} 1.0',
        ),
    ],
)
def test_series_that_are_asked_for_by_name_are_served_alone(name: str, sample: str) -> None:
    async def body() -> str:
        metrics = OperatorMetrics(lambda: [{**service(status={"phase": "Ready"}), "spec": {}}])
        metrics.set_leader(True)
        async with serving_probes("127.0.0.1", 0, metrics.registry, lambda: None, lambda: None) as address:
            return (await get(address, f"/metrics?name[]={name}"))[1]

    samples = [line for line in asyncio.run(body()).splitlines() if not line.startswith("#")]
    assert samples == [sample]


def test_a_port_in_use_is_named() -> None:
    async def body() -> None:
        registry = OperatorMetrics().registry
        async with serving_probes("127.0.0.1", 0, registry, lambda: None, lambda: None) as address:
            with pytest.raises(KvasirOperatorError, match=f"{address}: .*--port"):
                async with serving_probes(
                    "127.0.0.1", int(address.rpartition(":")[2]), registry, lambda: None, lambda: None
                ):
                    pass

    asyncio.run(body())


@pytest.mark.parametrize("client", ["127.0.0.1", "[::1]"])
def test_the_default_address_is_every_address_of_both_families(client: str) -> None:
    async def body() -> tuple[int, str]:
        registry = OperatorMetrics().registry
        async with serving_probes("::", 0, registry, lambda: None, lambda: None) as address:
            assert address.startswith("[::]:")
            return await get(f"{client}:{address.rpartition(':')[2]}", "/readyz")

    assert asyncio.run(body()) == (200, "ok")


def test_a_kernel_without_ipv6_serves_every_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)

    async def body() -> tuple[int, str]:
        registry = OperatorMetrics().registry
        async with serving_probes("::", 0, registry, lambda: None, lambda: None) as address:
            assert address.startswith("0.0.0.0:")
            return await get(f"127.0.0.1:{address.rpartition(':')[2]}", "/readyz")

    assert asyncio.run(body()) == (200, "ok")
