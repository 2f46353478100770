"""The client seam against a real API server: paging, watching, preconditions, and errors as our own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.errors import (
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
)
from kvasir_operator.kube.client import PAGE_SIZE, KubeClient
from kvasir_operator.kube.configuration import load_configuration
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, POD, SERVICE_ACCOUNT, Kind, KubeObject

from .control_plane import ControlPlane

Result = TypeVar("Result")


def unchanged(configuration: Configuration) -> None:
    """As the kubeconfig has it."""


def using(
    control_plane: ControlPlane,
    body: Callable[[KubeClient], Awaitable[Result]],
    change: Callable[[Configuration], None] = unchanged,
    page_size: int = PAGE_SIZE,
) -> Result:
    async def run() -> Result:
        configuration = await load_configuration(str(control_plane.operator_kubeconfig))
        change(configuration)
        client = KubeClient(configuration, page_size=page_size)
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


def account(namespace: str, name: str = "a", **metadata: Any) -> KubeObject:
    metadata = {"name": name, "namespace": namespace, "labels": {"x": "y"}, **metadata}
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def test_a_list_of_several_pages_is_read_to_its_end(control_plane: ControlPlane, namespace: str) -> None:
    async def body(client: KubeClient) -> list[KubeObject]:
        for number in range(5):
            await client.apply(account(namespace, f"m{number}"))
        return await client.list(SERVICE_ACCOUNT, namespace, {"x": "y"})

    found = using(control_plane, body, page_size=2)
    assert [(obj["kind"], obj["metadata"]["name"]) for obj in found] == [("ServiceAccount", f"m{n}") for n in range(5)]


def test_what_is_not_there_is_none_or_nothing_to_delete(control_plane: ControlPlane, namespace: str) -> None:
    async def body(client: KubeClient) -> KubeObject | None:
        await client.delete(SERVICE_ACCOUNT, namespace, "nobody", "uid")
        return await client.get(SERVICE_ACCOUNT, namespace, "nobody")

    assert using(control_plane, body) is None


def test_another_object_of_the_same_name_is_not_deleted(control_plane: ControlPlane, namespace: str) -> None:
    async def body(client: KubeClient) -> KubeObject | None:
        await client.apply(account(namespace))
        await client.delete(SERVICE_ACCOUNT, namespace, "a", "another-uid")
        return await client.get(SERVICE_ACCOUNT, namespace, "a")

    assert using(control_plane, body) is not None


REFUSALS: list[tuple[Callable[[KubeClient, str], Awaitable[Any]], type[Exception]]] = [
    (lambda client, ns: client.create(account(ns, "default")), ObjectConflictError),
    (lambda client, ns: client.create(account(ns, "No_Name")), ObjectRefusedError),
    (lambda client, ns: client.create(account("no-such-namespace")), ObjectNotFoundError),
    (lambda client, ns: client.list(Kind("none.example.com/v1", "None", "nones"), ns), ObjectNotFoundError),
    (lambda client, ns: client.replace(account(ns, "default", resourceVersion="1")), ObjectConflictError),
]


@pytest.mark.parametrize(("call", "expected"), REFUSALS, ids=["exists", "invalid", "namespace", "kind", "stale"])
def test_refusals_become_our_own_errors(
    control_plane: ControlPlane,
    namespace: str,
    call: Callable[[KubeClient, str], Awaitable[Any]],
    expected: type[Exception],
) -> None:
    control_plane.apply(account(namespace, "default"))
    with pytest.raises(expected):
        using(control_plane, lambda client: call(client, namespace))


def test_a_user_without_rights_is_told_which(control_plane: ControlPlane, namespace: str) -> None:
    def sign_out(configuration: Configuration) -> None:
        configuration.api_key = {}

    with pytest.raises(KubeForbiddenError, match=r'"system:anonymous" cannot list resource "pods"'):
        using(control_plane, lambda client: client.list(POD, namespace), sign_out)


def applied_service(control_plane: ControlPlane, namespace: str) -> KubeObject:
    spec = {"model": {"source": "pvc://claim/model"}, "engine": {"device": "cpu"}}
    return control_plane.apply(
        {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "metadata": {"name": "a", "namespace": namespace},
            "spec": spec,
        }
    )


def with_status(service: KubeObject, status: KubeObject, **metadata: str) -> KubeObject:
    names = {key: service["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
    described = {key: service[key] for key in ("apiVersion", "kind")}
    return {**described, "metadata": {**names, **metadata}, "status": status}


def condition(kind: str, reason: str) -> KubeObject:
    fields = {"message": "", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    return {"type": kind, "status": "True", "reason": reason, **fields}


def test_an_applied_status_leaves_the_spec_alone_and_what_it_leaves_out_goes(
    control_plane: ControlPlane, namespace: str
) -> None:
    before = applied_service(control_plane, namespace)

    async def body(client: KubeClient) -> KubeObject:
        first = await client.apply_status(with_status(before, {"phase": "Ready", "url": "http://x"}))
        return await client.apply_status(with_status(first, {"phase": "Idle"}))

    after = using(control_plane, body)
    assert after["status"] == {"phase": "Idle"}
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], 1)


def test_conditions_of_others_stay_where_ours_are_applied(control_plane: ControlPlane, namespace: str) -> None:
    service = applied_service(control_plane, namespace)
    others = {"conditions": [condition("Audited", "Yes")]}
    path = f"/apis/{INFERENCE_SERVICE.api_version}/namespaces/{namespace}/inferenceservices/a/status"
    service = control_plane.request("patch", path, {"status": others}, "application/merge-patch+json")

    async def body(client: KubeClient) -> KubeObject:
        both = [condition("Ready", "Serving"), condition("Degraded", "CrashLooping")]
        first = await client.apply_status(with_status(service, {"conditions": both}))
        return await client.apply_status(with_status(first, {"conditions": both[:1]}))

    after = using(control_plane, body)
    assert {each["type"]: each["reason"] for each in after["status"]["conditions"]} == {
        "Audited": "Yes",
        "Ready": "Serving",
    }


def test_a_namesake_does_not_get_its_predecessors_status(control_plane: ControlPlane, namespace: str) -> None:
    before = applied_service(control_plane, namespace)
    path = f"/apis/{INFERENCE_SERVICE.api_version}/namespaces/{namespace}/inferenceservices/a"
    control_plane.request("delete", path)
    applied_service(control_plane, namespace)
    with pytest.raises(ObjectConflictError):
        using(control_plane, lambda client: client.apply_status(with_status(before, {"phase": "Ready"})))
    assert "status" not in control_plane.request("get", path)


def test_a_service_that_is_gone_gets_no_status(control_plane: ControlPlane, namespace: str) -> None:
    service = applied_service(control_plane, namespace)
    gone = with_status(service, {"phase": "Ready"}, name="gone")
    with pytest.raises((ObjectNotFoundError, ObjectConflictError)):
        using(control_plane, lambda client: client.apply_status(gone))


async def watched(client: KubeClient, namespace: str, version: str, seconds: float) -> list[tuple[str, str]]:
    events = client.watch(SERVICE_ACCOUNT, namespace, {"x": "y"}, version, seconds)
    return [(event["type"], event["object"]["metadata"].get("name", "")) async for event in events]


def test_a_watch_tells_changes_of_labelled_objects_until_its_time_is_up(
    control_plane: ControlPlane, namespace: str
) -> None:
    async def body(client: KubeClient) -> list[tuple[str, str]]:
        version = (await client.apply(account(namespace)))["metadata"]["resourceVersion"]
        await client.apply(account(namespace, "unlabelled", labels={}))
        await client.apply(account(namespace, annotations={"k": "w"}))
        return await watched(client, namespace, version, 1)

    assert ("MODIFIED", "a") in (events := using(control_plane, body))
    assert "unlabelled" not in [name for _, name in events]


def test_an_address_without_an_api_server_is_unavailable(control_plane: ControlPlane) -> None:
    def go_astray(configuration: Configuration) -> None:
        configuration.host = "https://127.0.0.1:9"

    with pytest.raises(KubeUnavailableError, match="did not answer"):
        using(control_plane, lambda client: client.list(POD, "default"), go_astray)
