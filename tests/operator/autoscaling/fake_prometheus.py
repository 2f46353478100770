"""A server that answers as Prometheus does, with what it is told; `asked` are the questions."""

import re
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

Series = Mapping[str, Any]
IDLE = dict.fromkeys(
    (
        "kvasir_kv_cache_used_tokens",
        "kvasir_num_requests_running",
        "kvasir_num_requests_waiting",
        "kvasir_uncached_tokens",
        "kvasir_prefix_cache_queries_total",
    ),
    0.0,
)
"""What an engine that has made a step says if it has nothing to do."""


def vector(*values: tuple[Mapping[str, str], float | str]) -> dict[str, Any]:
    result = [{"metric": dict(labels), "value": [0, str(number)]} for labels, number in values]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


class FakePrometheus:
    """`answer`: a question's body and HTTP status. `tls` None: plain HTTP. `ahead_seconds`: of its clock."""

    def __init__(
        self, answer: Callable[[str], tuple[Any, int]], tls: ssl.SSLContext | None = None, ahead_seconds: float = 0.0
    ) -> None:
        self.answer = answer
        self._ahead_seconds = ahead_seconds
        self._tls = tls
        self.asked: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        app = web.Application()
        app.router.add_post("/api/v1/query", self._query)
        self._server = TestServer(app)

    async def __aenter__(self) -> Self:
        await self._server.start_server(ssl=self._tls)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("/"))

    async def _query(self, request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        self.asked.append(query)
        self.headers.append(dict(request.headers))
        body, status = self.answer(query)
        headers = {"Date": formatdate(time.time() + self._ahead_seconds, usegmt=True)}
        if isinstance(body, str):
            return web.Response(text=body, status=status, headers=headers)
        return web.json_response(body, status=status, headers=headers)


def engine_labels(pod: str, service: str = "llama") -> dict[str, str]:
    """As PodMonitors give them; `decode-0` is a pod of the role decode, and one that names no role serves."""
    role = next((role for role in ("prefill", "decode") if pod.startswith(role)), "serve")
    return {"namespace": "models", "inference_service": service, "role": role, "pod": pod}


def of_fleet(
    pods: Mapping[str, Mapping[str, float]], held: float, at: float, router: str = "router-0", service: str = "llama"
) -> Callable[[str], tuple[Any, int]]:
    """Gauges of engine pods by metric name, beside those of an idle one, and of one router; rates and latencies have no
    value."""
    known = {pod: IDLE | gauges for pod, gauges in pods.items()}

    def answer(query: str) -> tuple[Any, int]:
        [metric] = re.findall(r"kvasir_[a-z_]+", query)[:1]
        if metric.startswith("kvasir_router_"):
            number = at if "timestamp(" in query else held
            return vector(({"service": f"models/{service}", "pod": router}, number)), 200
        if not query.startswith(("max by (namespace, inference_service, role, pod)", "deriv(")):
            return vector(), 200
        found = [
            (pod, at if "timestamp(" in query else gauges[metric]) for pod, gauges in known.items() if metric in gauges
        ]
        return vector(*((engine_labels(pod, service), number) for pod, number in found)), 200

    return answer
