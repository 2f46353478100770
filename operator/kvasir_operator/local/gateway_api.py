"""What a gateway follows in place of a cluster: a run's services, and which of their engines are ready.

It answers the lists and watches that the gateway sends, as a Kubernetes API would, on a loopback address of the run's
own. Versions count the changes, so that a watch goes on from any of them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn

from aiohttp import web

from kvasir_operator.api import labels
from kvasir_operator.api.fields import as_manifest
from kvasir_operator.api.model import DisaggregationSpec, InferenceService
from kvasir_operator.local.pods import Listener, LocalPod

SERVICES_PATH: Final = f"/apis/{labels.API_VERSION}/{labels.PLURAL}"
SLICES_PATH: Final = "/apis/discovery.k8s.io/v1/endpointslices"
_WATCH_SECONDS: Final = 240.0


class GatewayApi:
    """Of the services behind the gateway, which stay as they are; `report_ready` adds an engine."""

    def __init__(self, services: Iterable[InferenceService]) -> None:
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._services = [service_object(service, created) for service in services]
        self._slices: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    def report_ready(self, namespace: str, service: str, engine: LocalPod) -> None:
        """From now on the gateway may send it requests; what becomes of it later the gateway finds out by itself."""
        self._slices.append(slice_object(namespace, service, engine, version=len(self._slices) + 1))
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def serving(self, listener: Listener) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get(SERVICES_PATH, partial(self._answer, self._services, []))
        app.router.add_get(SLICES_PATH, partial(self._answer, self._slices, self._slices))
        # A watch whose gateway is gone would wait on.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, listener.address, listener.port).start()
            yield
        finally:
            await runner.cleanup()

    async def _answer(
        self, objects: list[dict[str, Any]], added: list[dict[str, Any]], request: web.Request
    ) -> web.StreamResponse:
        """`added`: those whose versions count from 1, in order."""
        if request.query.get("watch", "").lower() != "true":
            return web.json_response({"metadata": {"resourceVersion": str(len(added))}, "items": objects})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            async with asyncio.timeout(_WATCH_SECONDS):
                await self._watch(response, added, num_seen=int(request.query["resourceVersion"]))
        except TimeoutError:
            return response  # as the API server ends a watch: the next one goes on from there

    async def _watch(self, response: web.StreamResponse, added: list[dict[str, Any]], num_seen: int) -> NoReturn:
        while True:
            changed = self._changed
            for one in added[num_seen:]:
                await response.write(json.dumps({"type": "ADDED", "object": one}).encode() + b"\n")
                num_seen += 1
            await changed.wait()


def service_object(service: InferenceService, created: str) -> dict[str, Any]:
    """What the gateway reads of a service, with defaults filled in."""
    router, engine = service.spec.router, service.spec.engine
    name, *aliases = service.model_names
    return {
        "metadata": {
            "namespace": service.namespace,
            "name": service.name,
            "creationTimestamp": created,
            "resourceVersion": "0",
        },
        "spec": {
            "model": {"name": name, "aliases": aliases},
            "engine": {} if engine.adapters is None else {"adapters": as_manifest(engine.adapters)},
            **_disaggregation(service.spec.disaggregation),
            "router": {
                "mode": router.mode,
                "policy": router.policy,
                "maxQueueSize": router.max_queue_size,
                "maxQueueWait": router.max_queue_wait.text,
            },
        },
    }


def _disaggregation(split: DisaggregationSpec | None) -> dict[str, Any]:
    return {} if split is None else {"disaggregation": {"remotePrefillMinTokens": split.remote_prefill_min_tokens}}


def slice_object(namespace: str, service: str, engine: LocalPod, version: int) -> dict[str, Any]:
    [listener] = engine.listeners
    metadata: Mapping[str, Any] = {
        "namespace": namespace,
        "name": engine.name,
        "labels": labels.role_labels(service, engine.role),
        "resourceVersion": str(version),
    }
    endpoint = {
        "addresses": [listener.address],
        "conditions": {"ready": True},
        "targetRef": {"kind": "Pod", "name": engine.name, "uid": engine.name},
    }
    return {
        "metadata": metadata,
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": listener.port}],
        "endpoints": [endpoint],
    }
