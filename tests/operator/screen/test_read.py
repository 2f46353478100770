"""What is read for the screen, what is read again, and what is said of what cannot be."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.operator.cluster_objects import deployment, service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import (
    CrdNotInstalledError,
    KindNotServedError,
    KubeForbiddenError,
    KubeUnavailableError,
    ServiceNotFoundError,
)
from kvasir_operator.kube.kinds import EVENT, INFERENCE_SERVICE, LEADER_WORKER_SET, Kind, KubeObject, ServiceKey
from kvasir_operator.screen.read import Snapshot, follow, read

KEY = ServiceKey("models", "llama")


class PartlyKube(MemoryKube):
    """`forbidden` cannot be listed, and `missing` are kinds that are not served."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: set[Kind] = set()
        self.missing: set[Kind] = set()

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        if kind in self.forbidden:
            raise KubeForbiddenError(f"{kind.plural} is forbidden", 403)
        return await super().get(kind, namespace, name)

    async def list_pages(self, kind: Kind, *arguments: Any, **options: Any) -> AsyncIterator[KubeObject]:
        if kind in self.forbidden:
            raise KubeForbiddenError(f"{kind.plural} is forbidden", 403)
        if kind in self.missing:
            raise KindNotServedError("404 page not found", 404)
        async for page in super().list_pages(kind, *arguments, **options):
            yield page


def kube_with(name: str = "llama") -> PartlyKube:
    kube = PartlyKube()
    kube.objects[(INFERENCE_SERVICE.kind, "models", name)] = service(name)
    kube.objects[("Deployment", "models", "llama-serve")] = deployment()
    about = {"uid": "uid-1"}
    for uid, reason in (("uid-1", "Created"), ("uid-2", "SomebodyElses")):
        metadata = {"name": reason, "namespace": "models"}
        kube.objects[(EVENT.kind, "models", reason)] = {
            "apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": about | {"uid": uid},
            "reason": reason,
        }  # fmt: skip
    return kube


def followed(kube: PartlyKube, number: int) -> list[Snapshot]:
    """The first snapshots; errors leave as they come."""

    async def run() -> list[Snapshot]:
        found: list[Snapshot] = []
        async for snapshot in follow(kube, KEY, 0.0):
            found.append(snapshot)
            if len(found) == number:
                break
        return found

    return asyncio.run(run())


def test_the_service_its_revisions_and_its_own_events_are_read() -> None:
    snapshot = asyncio.run(read(kube_with(), KEY))
    assert snapshot.service["metadata"]["name"] == "llama"
    assert [each.key for each in snapshot.workloads] == [("serve", "aaaa")]
    assert [each["reason"] for each in snapshot.events] == ["Created"]
    assert snapshot.notes == ()


def test_a_missing_service_is_named_beside_those_that_there_are() -> None:
    with pytest.raises(ServiceNotFoundError, match=r"no InferenceService 'llama' in namespace 'models': it has other"):
        asyncio.run(read(kube_with(name="other"), KEY))
    with pytest.raises(ServiceNotFoundError, match="it has none"):
        asyncio.run(read(PartlyKube(), KEY))


def test_a_missing_crd_and_a_missing_right_say_what_to_do() -> None:
    kube = kube_with()
    kube.failures = [KindNotServedError("404 page not found", 404)]
    with pytest.raises(CrdNotInstalledError, match=r"has no CRD inferenceservices\.serving\.kvasir\.dev: install"):
        asyncio.run(read(kube, KEY))
    kube.forbidden = {INFERENCE_SERVICE}
    with pytest.raises(KubeForbiddenError, match="is forbidden; ask for the ClusterRole view in namespace models"):
        asyncio.run(read(kube, KEY))


@pytest.mark.parametrize(("kind", "what"), [("Event", "Events"), ("Pod", "revisions")])
def test_what_may_not_be_read_is_left_out_and_said(kind: str, what: str) -> None:
    kube = kube_with()
    kube.forbidden = {Kind("v1", kind, f"{kind.lower()}s")}
    snapshot = asyncio.run(read(kube, KEY))
    assert snapshot.notes == (f"{what} are not shown: {kind.lower()}s is forbidden",)
    assert bool(snapshot.events) == (kind != "Event")
    assert bool(snapshot.workloads) == (kind != "Pod")


def test_leader_worker_sets_that_are_forbidden_or_not_served_hide_no_other_revision() -> None:
    forbidding, lacking = kube_with(), kube_with()
    forbidding.forbidden = {LEADER_WORKER_SET}
    lacking.missing = {LEADER_WORKER_SET}
    for kube in (forbidding, lacking):
        snapshot = asyncio.run(read(kube, KEY))
        assert [each.key for each in snapshot.workloads] == [("serve", "aaaa")]
        assert snapshot.notes == ()


def test_a_change_is_read() -> None:
    kube = kube_with()

    async def run() -> list[Snapshot]:
        shown: list[Snapshot] = []
        async for snapshot in follow(kube, KEY, 0.0):
            shown.append(snapshot)
            if len(shown) == 3:
                break
            if len(shown) == 2:
                kube.objects[(INFERENCE_SERVICE.kind, "models", "llama")]["status"] = {"phase": "Ready"}
        return shown

    first, second, third = asyncio.run(run())
    assert first == second
    assert third.service["status"] == {"phase": "Ready"}


def test_an_api_server_that_goes_away_is_said_and_waited_for() -> None:
    kube = kube_with()
    num_requests = _num_requests_of_a_read()
    kube.failures = [*num_requests * [None], KubeUnavailableError("no answer"), KubeUnavailableError("still none")]
    snapshots = followed(kube, 4)
    assert [each.notes for each in snapshots] == [
        (),
        ("not up to date: no answer",),
        ("not up to date: still none",),
        (),
    ]
    assert snapshots[2].service == snapshots[0].service


def _num_requests_of_a_read() -> int:
    kube = kube_with()
    kube.failures = 100 * [None]
    asyncio.run(read(kube, KEY))
    return 100 - len(kube.failures)


def test_one_that_was_never_there_or_no_longer_knows_the_user_ends_it() -> None:
    kube = kube_with()
    kube.failures = [KubeUnavailableError("no answer")]
    with pytest.raises(KubeUnavailableError, match="no answer"):
        followed(kube, 1)
    kube.failures = [*_num_requests_of_a_read() * [None], KubeUnavailableError("Unauthorized", 401)]
    with pytest.raises(KubeUnavailableError, match="Unauthorized"):
        followed(kube, 2)


def test_a_service_that_is_deleted_while_it_is_watched_ends_it() -> None:
    kube = kube_with()

    async def run() -> None:
        async for _ in follow(kube, KEY, 0.0):
            kube.objects.pop((INFERENCE_SERVICE.kind, "models", "llama"), None)

    with pytest.raises(ServiceNotFoundError):
        asyncio.run(run())
