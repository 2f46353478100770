"""Leader election: who may lead, and when a leader must go."""

import asyncio

import pytest

from kvasir_operator.errors import KubeUnavailableError, LeadershipLostError
from kvasir_operator.lease import LeaderElector, LeaseTiming, SeenLease, can_take

from .memory_kube import MemoryKube

TIMING = LeaseTiming(duration_seconds=15.0, renew_deadline_seconds=10.0, retry_seconds=0.001)
KEY = ("Lease", "system", "kvasir-operator")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def elector(kube: MemoryKube, identity: str, clock: Clock | None = None) -> LeaderElector:
    return LeaderElector(kube, "system", identity, clock or Clock(), TIMING)


def held_by(kube: MemoryKube) -> str:
    return str(kube.objects[KEY]["spec"]["holderIdentity"])


@pytest.mark.parametrize(
    ("holder", "age_seconds", "expected"),
    [("me", 0.0, True), ("", 0.0, True), ("other", 14.9, False), ("other", 15.0, True)],
)
def test_a_lease_is_taken_when_it_is_ours_free_or_not_renewed_for_its_duration(
    holder: str, age_seconds: float, expected: bool
) -> None:
    lease = {"spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}}
    assert can_take(SeenLease(lease, changed_at=50.0), "me", 50.0 + age_seconds) is expected


def test_the_first_one_creates_the_lease_and_a_second_one_waits() -> None:
    async def body() -> None:
        kube = MemoryKube()
        await elector(kube, "first").acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await elector(kube, "second").acquire()
        assert held_by(kube) == "first"

    asyncio.run(body())


def test_a_released_lease_is_taken_at_once() -> None:
    async def body() -> None:
        kube = MemoryKube()
        first = elector(kube, "first")
        await first.acquire()
        await first.release()
        await asyncio.wait_for(elector(kube, "second").acquire(), 5)
        assert held_by(kube) == "second"
        assert kube.objects[KEY]["spec"]["leaseTransitions"] == 2

    asyncio.run(body())


def test_a_dead_leader_is_replaced_after_the_leases_duration_by_the_successors_own_clock() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        await elector(kube, "dead").acquire()
        waiting = asyncio.create_task(elector(kube, "successor", clock).acquire())
        while len(kube.objects) and not waiting.done():
            await asyncio.sleep(0.001)
            clock.now += 1.0
        assert held_by(kube) == "successor"
        assert clock.now >= 115.0

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_leader_keeps_renewing_through_a_short_outage() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = elector(kube, "leader")
        await leader.acquire()
        kube.failures = [KubeUnavailableError("down")] * 3
        before = len(kube.writes)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await leader.keep()
        assert len(kube.writes) > before
        assert not kube.failures

    asyncio.run(body())


def test_a_leader_that_cannot_renew_in_time_must_go() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        leader = elector(kube, "leader", clock)
        await leader.acquire()
        kube.failures = [KubeUnavailableError("down")] * 100
        clock.now += 10.0
        with pytest.raises(LeadershipLostError, match="not renewed for 10 s"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_leader_whose_lease_was_taken_must_go() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = elector(kube, "leader")
        await leader.acquire()
        kube.objects[KEY]["spec"]["holderIdentity"] = "usurper"
        with pytest.raises(LeadershipLostError, match="usurper took Lease"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_one_who_never_led_releases_nothing() -> None:
    async def body() -> None:
        kube = MemoryKube()
        await elector(kube, "leader").acquire()
        await elector(kube, "other").release()
        assert held_by(kube) == "leader"

    asyncio.run(body())
