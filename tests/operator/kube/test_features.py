"""What the cluster is found to serve, and when it is asked again."""

import asyncio
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.errors import KindNotServedError, KubeApiError, KubeForbiddenError, KubeUnavailableError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.features import Discovery, read_kinds
from kvasir_operator.kube.kinds import POD_DISRUPTION_BUDGET, POD_MONITOR, SECRET, Kind, listed_child_kinds


class ServingKube(KubeClient):
    """Answers discovery from `served`; a path that is not there raises `missing`."""

    def __init__(self, *paths: str, missing: KubeApiError | None = None) -> None:
        super().__init__(Configuration())
        self.served = {path.rpartition("/")[0]: path.rpartition("/")[2] for path in paths}
        self.missing = missing or KindNotServedError("404 page not found", 404)
        self.asked = asyncio.Event()

    async def read_path(self, path: str) -> dict[str, Any]:
        self.asked.set()
        if path not in self.served:
            raise self.missing
        return {"resources": [{"name": self.served[path]}, {"name": f"{self.served[path]}/status"}]}


MONITORS = "/apis/monitoring.coreos.com/v1/podmonitors"


def test_a_kind_is_served_where_its_group_names_it() -> None:
    kube = ServingKube(MONITORS, "/apis/gateway.networking.k8s.io/v1/gateways")
    assert asyncio.run(read_kinds(kube)) == frozenset({POD_MONITOR})


def test_a_group_that_may_not_be_read_counts_as_absent() -> None:
    kube = ServingKube(missing=KubeForbiddenError("forbidden", 403))
    assert asyncio.run(read_kinds(kube)) == frozenset()


def test_an_api_server_that_is_away_is_no_answer() -> None:
    with pytest.raises(KubeUnavailableError):
        asyncio.run(read_kinds(ServingKube(missing=KubeUnavailableError("down"))))


def test_children_are_listed_of_every_kind_that_is_served_but_secrets() -> None:
    without, with_monitors = listed_child_kinds([]), listed_child_kinds([POD_MONITOR])
    assert set(with_monitors) - set(without) == {POD_MONITOR}
    assert POD_DISRUPTION_BUDGET in without
    assert SECRET not in with_monitors


async def no_resync() -> None:
    """Where a test is about features alone."""


async def changed_to(discovery: Discovery, before: frozenset[Kind]) -> frozenset[Kind]:
    while discovery.kinds == before:  # noqa: ASYNC110, discovery has no event for tests
        await asyncio.sleep(0.001)
    return discovery.kinds


def test_a_crd_that_is_installed_later_is_found_and_reported() -> None:
    async def body() -> tuple[frozenset[Kind], int]:
        kube, calls = ServingKube(), []
        before = await read_kinds(kube)
        discovery = Discovery(kube, before, lambda: calls.append(1), no_resync, soon_seconds=0.0)
        running = asyncio.create_task(discovery.run(0.001))
        kube.served = {"/apis/monitoring.coreos.com/v1": "podmonitors"}
        after = await changed_to(discovery, before)
        kube.asked.clear()
        await kube.asked.wait()  # looked again, and nothing had changed
        running.cancel()
        return after, len(calls)

    assert asyncio.run(asyncio.wait_for(body(), 10)) == (frozenset({POD_MONITOR}), 1)


def test_a_kind_that_is_no_longer_known_is_looked_for_before_the_interval_is_over() -> None:
    async def body() -> frozenset[Any]:
        kube = ServingKube()
        before = frozenset({POD_MONITOR})
        discovery = Discovery(kube, before, lambda: None, no_resync, soon_seconds=0.0)
        running = asyncio.create_task(discovery.run(3600.0))
        discovery.doubt()
        after = await changed_to(discovery, before)
        running.cancel()
        return after

    assert asyncio.run(asyncio.wait_for(body(), 10)) == frozenset()


def test_what_was_known_holds_while_the_api_server_is_away() -> None:
    async def body() -> frozenset[Kind]:
        kube = ServingKube(missing=KubeUnavailableError("down"))
        before = frozenset({POD_MONITOR})
        discovery = Discovery(kube, before, lambda: None, no_resync, soon_seconds=0.0)
        running = asyncio.create_task(discovery.run(0.001))
        for _ in range(3):
            kube.asked.clear()
            await kube.asked.wait()
        running.cancel()
        return discovery.kinds

    assert asyncio.run(asyncio.wait_for(body(), 10)) == {POD_MONITOR}


@pytest.mark.parametrize(
    ("interval_seconds", "served", "is_resynced"),
    [(0.001, {}, True), (3600.0, {"/apis/monitoring.coreos.com/v1": "podmonitors"}, True), (3600.0, {}, False)],
    ids=["once an interval", "after a change", "not after a doubt without cause"],
)
def test_every_service_is_looked_at_again_once_an_interval_and_after_a_change(
    interval_seconds: float, served: dict[str, str], is_resynced: bool
) -> None:
    async def body() -> bool:
        kube, resynced = ServingKube(), asyncio.Event()
        before = await read_kinds(kube)

        async def resync() -> None:
            resynced.set()

        discovery = Discovery(kube, before, lambda: None, resync, soon_seconds=0.0)
        running = asyncio.create_task(discovery.run(interval_seconds))
        kube.served = served
        if interval_seconds > 1:
            discovery.doubt()
        if is_resynced:
            await resynced.wait()
        else:
            kube.asked.clear()
            await kube.asked.wait()
            discovery.doubt()
            kube.asked.clear()
            await kube.asked.wait()
        running.cancel()
        return resynced.is_set()

    assert asyncio.run(asyncio.wait_for(body(), 10)) is is_resynced
