"""What is read for the screen, when it is read again, and what is said of what cannot be."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from tests.operator.cluster_objects import deployment, service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import (
    CrdNotInstalledError,
    KindNotServedError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ServiceNotFoundError,
    WatchExpiredError,
)
from kvasir_operator.kube.kinds import EVENT, INFERENCE_SERVICE, LEADER_WORKER_SET, Kind, KubeObject, ServiceKey
from kvasir_operator.queue.back_off import BackOff
from kvasir_operator.screen.read import Snapshot, follow, read

KEY = ServiceKey("models", "llama")
AT_ONCE = BackOff(0.0, 0.0)


class WatchedKube(MemoryKube):
    """`watches`: what each watch brings in turn, an error last where it breaks off. `forbidden` cannot be listed, and
    `missing` are kinds that are not served."""

    def __init__(self, *watches: list[dict[str, Any] | KubeApiError]) -> None:
        super().__init__()
        self.watches = list(watches)
        self.watched_from: list[tuple[str, str | None]] = []
        self.forbidden: set[Kind] = set()
        self.missing: set[Kind] = set()

    async def list_pages(self, kind: Kind, *arguments: Any, **options: Any) -> AsyncIterator[KubeObject]:
        if kind in self.forbidden:
            raise KubeForbiddenError(f"{kind.plural} is forbidden", 403)
        if kind in self.missing:
            raise KindNotServedError("404 page not found", 404)
        async for page in super().list_pages(kind, *arguments, **options):
            yield page

    async def watch(
        self, kind: Kind, namespace: str | None, labels: Any, resource_version: str, seconds: float,
        fields: str | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:  # fmt: skip
        self.watched_from.append((resource_version, fields))
        for event in self.watches.pop(0) if self.watches else [KubeUnavailableError("no more", 401)]:
            if isinstance(event, KubeApiError):
                raise event
            yield event


def kube_with(*watches: list[dict[str, Any] | KubeApiError], name: str = "llama") -> WatchedKube:
    kube = WatchedKube(*watches)
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


def followed(kube: WatchedKube, number: int) -> list[Snapshot]:
    """The first snapshots; errors leave as they come."""

    async def run() -> list[Snapshot]:
        found: list[Snapshot] = []
        async for snapshot in follow(kube, KEY, AT_ONCE):
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
        asyncio.run(read(WatchedKube(), KEY))


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


def test_a_change_is_read_and_the_watch_goes_on_from_there() -> None:
    kube = kube_with([{"type": "MODIFIED"}], [{"type": "BOOKMARK"}])
    assert [each.version for each in followed(kube, 3)] == [0, 0, 0]
    assert kube.watched_from == [("0", "metadata.name=llama")] * 2


def test_a_version_that_is_too_old_and_a_watch_that_ends_are_no_errors() -> None:
    assert [each.notes for each in followed(kube_with([WatchExpiredError("gone", 410)], []), 3)] == [(), (), ()]


def test_an_api_server_that_goes_away_is_said_and_waited_for() -> None:
    kube = kube_with([KubeUnavailableError("no answer")])
    kube.failures = [*8 * [None], KubeUnavailableError("still none")]
    snapshots = followed(kube, 4)
    assert [each.notes for each in snapshots] == [
        (),
        ("not up to date: no answer",),
        ("not up to date: still none",),
        (),
    ]
    assert snapshots[2].service == snapshots[0].service


def test_one_that_was_never_there_or_no_longer_knows_the_user_ends_it() -> None:
    kube = kube_with()
    kube.failures = [KubeUnavailableError("no answer")]
    with pytest.raises(KubeUnavailableError, match="no answer"):
        followed(kube, 1)
    with pytest.raises(KubeUnavailableError, match="Unauthorized"):
        followed(kube_with([KubeUnavailableError("Unauthorized", 401)]), 2)


def test_a_service_that_is_deleted_while_it_is_watched_ends_it() -> None:
    kube = kube_with([{"type": "DELETED"}])

    async def run() -> None:
        async for _ in follow(kube, KEY, AT_ONCE):
            kube.objects.pop((INFERENCE_SERVICE.kind, "models", "llama"), None)

    with pytest.raises(ServiceNotFoundError):
        asyncio.run(run())
