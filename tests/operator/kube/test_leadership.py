"""Which Leases an operator needs, and what becomes of it while another one holds one of them."""

import asyncio

import pytest
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KvasirOperatorError, LeadershipLostError
from kvasir_operator.kube.kinds import NamespacedName
from kvasir_operator.kube.leadership import CLAIM_TIMING, Leadership, lease_names, make_electors
from kvasir_operator.kube.lease import LeaderElector, LeaseTiming
from kvasir_operator.settings import OperatorSettings

OWN_A, OWN_B = NamespacedName("release-a", "kvasir-operator"), NamespacedName("release-b", "kvasir-operator")
CLUSTER = NamespacedName("default", "kvasir-operator-cluster-wide")
TIMING = LeaseTiming(retry_seconds=0.001)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"leader_election": False}, []),
        ({}, ["kvasir/kvasir-operator", "default/kvasir-operator-cluster-wide"]),
        ({"lease_namespace": "locks"}, ["locks/kvasir-operator", "default/kvasir-operator-cluster-wide"]),
        ({"cluster_lease_namespace": "x"}, ["kvasir/kvasir-operator", "x/kvasir-operator-cluster-wide"]),
        ({"namespace": ("b", "a")}, ["a/kvasir-operator", "b/kvasir-operator"]),
        ({"namespace": ("b", "a"), "lease_namespace": "locks"}, ["locks/kvasir-operator"]),
    ],
)
def test_each_way_of_watching_has_its_leases(flags: dict[str, object], expected: list[str]) -> None:
    settings = OperatorSettings(**{"leader_election": True, **flags})  # type: ignore[arg-type]
    assert [str(name) for name in lease_names(settings, "kvasir")] == expected


def test_a_lease_outside_a_pod_needs_a_namespace() -> None:
    with pytest.raises(KvasirOperatorError, match="give --lease-namespace"):
        lease_names(OperatorSettings(leader_election=True), None)


class Contender:
    """One operator process with its Leases."""

    def __init__(self, kube: MemoryKube, identity: str, *leases: NamespacedName) -> None:
        clock = asyncio.get_running_loop().time
        electors = make_electors(kube, leases, identity, clock, TIMING)
        self.leadership = Leadership(electors, TIMING.retry_seconds)
        self.leading = asyncio.create_task(self.leadership.acquire())

    async def leads_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait({self.leading}, timeout=seconds)
        return bool(done)


def holder(kube: MemoryKube, lease: NamespacedName) -> str:
    return str(kube.objects[("Lease", lease.namespace, lease.name)]["spec"]["holderIdentity"])


def test_a_second_cluster_wide_release_says_who_leads_and_stands_by_until_it_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        kube = MemoryKube()
        first = Contender(kube, "release-a/pod", OWN_A, CLUSTER)
        assert await first.leads_within(10)
        second = Contender(kube, "release-b/pod", OWN_B, CLUSTER)
        assert not await second.leads_within(0.05)
        assert (holder(kube, OWN_B), holder(kube, CLUSTER)) == ("release-b/pod", str(OWN_A))
        with pytest.raises(LeadershipLostError):
            second.leadership.check()
        await first.leadership.release()
        assert await second.leads_within(10)
        second.leadership.check()

    asyncio.run(body())
    [warning] = caplog.messages
    assert f"{OWN_A} serves the whole cluster (it holds Lease {CLUSTER})" in warning
    assert "--namespace" in warning


def test_a_replica_that_stands_by_takes_no_lease_beyond_the_one_that_it_lacks() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = Contender(kube, "leader", OWN_A)
        assert await leader.leads_within(10)
        standby = Contender(kube, "standby", OWN_A, CLUSTER)
        assert not await standby.leads_within(0.05)
        assert ("Lease", *CLUSTER) not in kube.objects
        standby.leading.cancel()

    asyncio.run(body())


def test_operators_of_different_namespaces_do_not_wait_for_each_other() -> None:
    async def body() -> None:
        kube = MemoryKube()
        assert await Contender(kube, "a", OWN_A).leads_within(10)
        assert await Contender(kube, "b", OWN_B).leads_within(10)

    asyncio.run(body())


def test_losing_any_lease_ends_leadership() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = Contender(kube, "leader", OWN_A, CLUSTER)
        assert await leader.leads_within(10)
        stored = kube.objects[("Lease", *CLUSTER)]
        await kube.replace({**stored, "spec": {**stored["spec"], "holderIdentity": "usurper"}})
        with pytest.raises(LeadershipLostError, match="usurper took Lease default/kvasir-operator-cluster-wide"):
            await leader.leadership.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


class Clock:
    """Of all processes of a test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def electors(kube: MemoryKube, own: NamespacedName, identity: str, clock: Clock) -> tuple[LeaderElector, LeaderElector]:
    """Of the release's own Lease and of its claim on the cluster."""
    first, claim = make_electors(kube, [own, CLUSTER], identity, clock, LeaseTiming())
    return first, claim


def test_another_replica_of_the_release_has_the_claim_as_soon_as_it_has_the_own_lease() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        for each in electors(kube, OWN_A, "dead", clock):
            assert await each.take()
        own, claim = electors(kube, OWN_A, "replica", clock)
        await own.look()
        clock.now += LeaseTiming().duration_seconds
        assert await own.take()
        assert await claim.take()
        claim.check()

    asyncio.run(body())


def test_another_release_has_the_claim_of_one_that_died_when_nobody_renewed_it_for_its_duration() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        for each in electors(kube, OWN_A, "dead", clock):
            assert await each.take()
        own, claim = electors(kube, OWN_B, "other", clock)
        assert [await own.take(), await claim.take()] == [True, False]
        clock.now += CLAIM_TIMING.duration_seconds - 0.1
        assert [await own.take(), await claim.take()] == [True, False]
        clock.now += 0.1
        assert [await own.take(), await claim.take()] == [True, True]

    asyncio.run(body())


def test_a_claim_is_given_up_well_before_another_release_may_take_it() -> None:
    latest = CLAIM_TIMING.renew_seconds + CLAIM_TIMING.retry_seconds + CLAIM_TIMING.renew_deadline_seconds
    assert latest <= 0.8 * CLAIM_TIMING.duration_seconds


def test_who_woke_after_another_replica_took_over_neither_renews_nor_releases_the_claim() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        paused = electors(kube, OWN_A, "paused", clock)
        for each in paused:
            assert await each.take()
        leader = electors(kube, OWN_A, "leader", clock)
        await leader[0].look()
        clock.now += LeaseTiming().duration_seconds
        for each in leader:
            assert await each.take()
        await paused[1].look()  # it knows the claim as it is now
        before = len(kube.writes)
        with pytest.raises(LeadershipLostError, match="release-a/kvasir-operator was not renewed"):
            await paused[1].take()
        await Leadership(paused, 1.0).release()
        assert (len(kube.writes), holder(kube, CLUSTER)) == (before, str(OWN_A))
        await Leadership(leader, 1.0).release()
        assert (holder(kube, CLUSTER), holder(kube, OWN_A)) == ("", "")

    asyncio.run(body())


def test_without_leases_it_leads_at_once() -> None:
    async def body() -> None:
        alone = Contender(MemoryKube(), "alone")
        assert await alone.leads_within(10)
        alone.leadership.check()

    asyncio.run(body())
