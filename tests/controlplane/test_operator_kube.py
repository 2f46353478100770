"""The client seam against a real API server: paging, watching, preconditions, and errors as our own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from kvasir_operator import kube
from kvasir_operator.errors import (
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
)
from kvasir_operator.kinds import CONFIG_MAP, INFERENCE_SERVICE, POD, Kind, KubeObject
from kvasir_operator.kube import KubeClient, load_configuration

from .control_plane import ControlPlane

Result = TypeVar("Result")


def using(control_plane: ControlPlane, body: Callable[[KubeClient], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        client = KubeClient(await load_configuration(str(control_plane.operator_kubeconfig)))
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


def config_map(namespace: str, name: str = "a", **metadata: Any) -> KubeObject:
    metadata = {"name": name, "namespace": namespace, "labels": {"x": "y"}, **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": "v"}}


def test_a_list_of_several_pages_is_read_to_its_end(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "PAGE_SIZE", 2)

    async def body(client: KubeClient) -> list[KubeObject]:
        for number in range(5):
            await client.apply(config_map(namespace, f"m{number}"))
        return await client.list(CONFIG_MAP, namespace, "x=y")

    found = using(control_plane, body)
    assert [(obj["kind"], obj["metadata"]["name"]) for obj in found] == [("ConfigMap", f"m{n}") for n in range(5)]


def test_what_is_not_there_is_none_or_nothing_to_delete(control_plane: ControlPlane, namespace: str) -> None:
    async def body(client: KubeClient) -> KubeObject | None:
        await client.delete(CONFIG_MAP, namespace, "nobody", "uid")
        return await client.get(CONFIG_MAP, namespace, "nobody")

    assert using(control_plane, body) is None


def test_another_object_of_the_same_name_is_not_deleted(control_plane: ControlPlane, namespace: str) -> None:
    async def body(client: KubeClient) -> KubeObject | None:
        await client.apply(config_map(namespace))
        await client.delete(CONFIG_MAP, namespace, "a", "another-uid")
        return await client.get(CONFIG_MAP, namespace, "a")

    assert using(control_plane, body) is not None


REFUSALS: list[tuple[Callable[[KubeClient, str], Awaitable[Any]], type[Exception]]] = [
    (lambda client, ns: client.create(config_map(ns, "kube-root-ca.crt")), ObjectConflictError),
    (lambda client, ns: client.create(config_map(ns, "No_Name")), ObjectRefusedError),
    (lambda client, ns: client.create(config_map("no-such-namespace")), ObjectNotFoundError),
    (lambda client, ns: client.list(Kind("none.example.com/v1", "None", "nones"), ns), ObjectNotFoundError),
    (lambda client, ns: client.replace(config_map(ns, "kube-root-ca.crt", resourceVersion="1")), ObjectConflictError),
]


@pytest.mark.parametrize(("call", "expected"), REFUSALS, ids=["exists", "invalid", "namespace", "kind", "stale"])
def test_refusals_become_our_own_errors(
    control_plane: ControlPlane,
    namespace: str,
    call: Callable[[KubeClient, str], Awaitable[Any]],
    expected: type[Exception],
) -> None:
    control_plane.apply(config_map(namespace, "kube-root-ca.crt"))
    with pytest.raises(expected):
        using(control_plane, lambda client: call(client, namespace))


def test_a_user_without_rights_is_told_which(control_plane: ControlPlane, namespace: str) -> None:
    async def body(client: KubeClient) -> None:
        client._api.configuration.api_key = {}
        await client.list(POD, namespace)

    with pytest.raises(KubeForbiddenError, match=r'"system:anonymous" cannot list resource "pods"'):
        using(control_plane, body)


def test_a_status_write_leaves_the_spec_alone(control_plane: ControlPlane, namespace: str) -> None:
    manifest = {"apiVersion": INFERENCE_SERVICE.api_version, "kind": INFERENCE_SERVICE.kind}
    metadata = {"name": "a", "namespace": namespace}
    spec = {"model": {"source": "pvc://claim/model"}, "engine": {"device": "cpu"}}
    before = control_plane.apply({**manifest, "metadata": metadata, "spec": spec})

    async def body(client: KubeClient) -> KubeObject:
        await client.merge_status(INFERENCE_SERVICE, namespace, "a", {"phase": "Ready", "url": "http://x"})
        return await client.merge_status(INFERENCE_SERVICE, namespace, "a", {"url": None})

    after = using(control_plane, body)
    assert after["status"] == {"phase": "Ready"}
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], 1)


async def watched(client: KubeClient, namespace: str, version: str, seconds: float) -> list[tuple[str, str]]:
    events = client.watch(CONFIG_MAP, namespace, "x=y", version, seconds)
    return [(event["type"], event["object"]["metadata"].get("name", "")) async for event in events]


def test_a_watch_tells_changes_of_labelled_objects_until_its_time_is_up(
    control_plane: ControlPlane, namespace: str
) -> None:
    async def body(client: KubeClient) -> list[tuple[str, str]]:
        version = (await client.apply(config_map(namespace)))["metadata"]["resourceVersion"]
        await client.apply(config_map(namespace, "unlabelled", labels={}))
        await client.apply({**config_map(namespace), "data": {"k": "w"}})
        return await watched(client, namespace, version, 1)

    assert ("MODIFIED", "a") in (events := using(control_plane, body))
    assert "unlabelled" not in [name for _, name in events]


def test_an_address_without_an_api_server_is_unavailable(control_plane: ControlPlane) -> None:
    async def body(client: KubeClient) -> None:
        client._api.configuration.host = "https://127.0.0.1:9"
        await client.list(POD, "default")

    with pytest.raises(KubeUnavailableError, match="did not answer"):
        using(control_plane, body)
