"""Reads what the screen shows, once or every other second, with no more rights than whoever views a namespace has."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from kvasir_operator.errors import (
    CrdNotInstalledError,
    KindNotServedError,
    KubeForbiddenError,
    KubeUnavailableError,
    ServiceNotFoundError,
)
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import (
    DEPLOYMENT,
    EVENT,
    INFERENCE_SERVICE,
    LEADER_WORKER_SET,
    SERVICE,
    STATEFUL_SET,
    KubeObject,
    ServiceKey,
)
from kvasir_operator.observe.observe import observe
from kvasir_operator.rollout.observed import observe_workloads
from kvasir_operator.rollout.workload import Workload

Found = TypeVar("Found")
FOLLOW_SECONDS = 2.0
_WORKLOADS = (DEPLOYMENT, STATEFUL_SET, SERVICE)
_UNAUTHORIZED = 401


@dataclass(frozen=True)
class Snapshot:
    """One moment of a service: what the screen shows, as it was read."""

    service: KubeObject
    workloads: tuple[Workload, ...] = ()
    """Every role's revisions, those that are kept at zero for a rollback too."""
    events: tuple[KubeObject, ...] = ()
    """About the service itself, in no order."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""


async def follow(client: KubeClient, key: ServiceKey, seconds: float = FOLLOW_SECONDS) -> AsyncIterator[Snapshot]:
    """The service every so many seconds, until it is deleted (ServiceNotFoundError).

    While the API server does not answer, the last snapshot with a note that says so. Raises KubeApiError as `read`,
    for what waiting would not mend.
    """
    snapshot = await read(client, key)
    while True:
        yield snapshot
        await asyncio.sleep(seconds)
        try:
            snapshot = await read(client, key)
        except KubeUnavailableError as error:
            if error.status == _UNAUTHORIZED:
                raise
            snapshot = replace(snapshot, notes=(f"not up to date: {error}",))


async def read(client: KubeClient, key: ServiceKey) -> Snapshot:
    """Raises ServiceNotFoundError, CrdNotInstalledError, and other KubeApiErrors that say what to do.

    Revisions and Events that may not be read are left out, and a note says so.
    """
    service = await _read_service(client, key)
    (workloads, no_workloads), (events, no_events) = await asyncio.gather(
        _unless_forbidden(_read_workloads(client, key, service), "revisions"),
        _unless_forbidden(_read_events(client, key, service), "Events"),
    )
    return Snapshot(service, tuple(workloads), tuple(events), (*no_workloads, *no_events))


async def _read_service(client: KubeClient, key: ServiceKey) -> KubeObject:
    try:
        if found := await client.get(INFERENCE_SERVICE, key.namespace, key.name):
            return found
        names = [each["metadata"]["name"] for each in await client.list(INFERENCE_SERVICE, key.namespace)]
    except KindNotServedError as error:
        raise CrdNotInstalledError(f"{INFERENCE_SERVICE.plural}.{INFERENCE_SERVICE.group}") from error
    except KubeForbiddenError as error:
        advice = f"ask for the ClusterRole view in namespace {key.namespace}"
        raise KubeForbiddenError(f"{error}; {advice}", error.status) from error
    raise ServiceNotFoundError(key.namespace, key.name, names)


async def _read_workloads(client: KubeClient, key: ServiceKey, service: KubeObject) -> list[Workload]:
    try:
        observed = await observe(client, key, (), (*_WORKLOADS, LEADER_WORKER_SET))
    except (KindNotServedError, KubeForbiddenError):  # not installed, or not of those that `view` covers
        observed = await observe(client, key, (), _WORKLOADS)
    now = datetime.now(UTC).isoformat()
    return [each.workload for each in observe_workloads(observed, service["metadata"]["uid"], now)]


async def _read_events(client: KubeClient, key: ServiceKey, service: KubeObject) -> list[KubeObject]:
    return await client.list(EVENT, key.namespace, fields=f"involvedObject.uid={service['metadata']['uid']}")


async def _unless_forbidden(reading: Awaitable[list[Found]], what: str) -> tuple[list[Found], tuple[str, ...]]:
    """What was read, and a note where it may not be."""
    try:
        return await reading, ()
    except KubeForbiddenError as error:
        return [], (f"{what} are not shown: {error}",)
