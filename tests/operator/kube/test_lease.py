"""Leader election: who may lead, and when a leader must go."""

import asyncio

import pytest
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KubeUnavailableError, LeadershipLostError
from kvasir_operator.kube.kinds import Kind, KubeObject, NamespacedName
from kvasir_operator.kube.lease import LeaderElector, LeaseTiming, SeenLease, can_take

TIMING = LeaseTiming(duration_seconds=15.0, renew_deadline_seconds=10.0, retry_seconds=0.001)
KEY = ("Lease", "system", "kvasir-operator")


def test_a_leases_times_are_the_default_ones_in_proportion() -> None:
    assert LeaseTiming.of(15) == LeaseTiming()
    assert LeaseTiming.of(6) == LeaseTiming(6, 4.0, retry_seconds=pytest.approx(0.8), gone_seconds=pytest.approx(1.6))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def elector(kube: MemoryKube, identity: str, clock: Clock | None = None) -> LeaderElector:
    return LeaderElector(kube, NamespacedName("system", "kvasir-operator"), identity, clock or Clock(), TIMING)


async def rob(kube: MemoryKube) -> None:
    """As somebody does who writes himself into the Lease."""
    stored = kube.objects[KEY]
    await kube.replace({**stored, "spec": {**stored["spec"], "holderIdentity": "usurper"}})


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


def test_the_first_one_creates_the_lease_and_a_second_one_does_not_get_it() -> None:
    async def body() -> None:
        kube = MemoryKube()
        second = elector(kube, "second")
        assert [await elector(kube, "first").take(), await second.take()] == [True, False]
        assert (held_by(kube), second.holder) == ("first", "first")

    asyncio.run(body())


def test_the_labels_of_a_lease_outlive_its_renewals_and_its_release() -> None:
    async def body() -> None:
        kube = MemoryKube()
        metadata = {"name": "kvasir-operator", "namespace": "system", "labels": {"installed-by": "helm"}}
        await kube.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata})
        first = elector(kube, "first")
        assert [await first.take(), await first.take()] == [True, True]
        await first.release()
        assert held_by(kube) == ""
        assert kube.objects[KEY]["metadata"]["labels"] == {"installed-by": "helm"}

    asyncio.run(body())


def test_a_released_lease_is_taken_at_once() -> None:
    async def body() -> None:
        kube = MemoryKube()
        first = elector(kube, "first")
        await first.take()
        await first.release()
        assert await elector(kube, "second").take()
        assert held_by(kube) == "second"
        assert kube.objects[KEY]["spec"]["leaseTransitions"] == 2

    asyncio.run(body())


def test_a_lease_is_released_once() -> None:
    async def body() -> None:
        kube = MemoryKube()
        first = elector(kube, "first")
        await first.take()
        await first.release()
        await elector(kube, "second").take()
        await first.release()
        assert held_by(kube) == "second"

    asyncio.run(body())


def test_a_dead_leader_is_replaced_after_the_leases_duration_by_the_successors_own_clock() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        await elector(kube, "dead").take()
        successor = elector(kube, "successor", clock)
        await successor.look()
        clock.now += 14.9
        assert not await successor.take()
        clock.now += 0.1
        assert await successor.take()

    asyncio.run(body())


def test_a_leader_keeps_renewing_through_a_short_outage() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = elector(kube, "leader")
        await leader.take()
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
        await leader.take()
        kube.failures = [KubeUnavailableError("down")] * 100
        clock.now += 10.0
        with pytest.raises(LeadershipLostError, match="was not renewed for 10 s"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_leader_whose_lease_was_taken_must_go() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = elector(kube, "leader")
        await leader.take()
        await rob(kube)
        with pytest.raises(LeadershipLostError, match="usurper took Lease"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


@pytest.mark.parametrize(("gone_seconds", "is_made_anew"), [(0.0, False), (3.9, False), (4.0, True)])
@pytest.mark.parametrize("is_leader", [True, False])
def test_a_lease_that_is_gone_is_made_anew_once_it_has_been_gone_for_a_while(
    gone_seconds: float, is_made_anew: bool, is_leader: bool
) -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        await elector(kube, "leader").take()
        one = elector(kube, "leader" if is_leader else "standby", clock)
        assert await one.take() is is_leader
        del kube.objects[KEY]
        assert not await one.take()
        clock.now += gone_seconds
        assert await one.take() is is_made_anew
        assert (KEY in kube.objects) is is_made_anew

    asyncio.run(body())


def test_a_lease_that_comes_back_and_goes_again_is_gone_since_then() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        leader = elector(kube, "leader", clock)
        await leader.take()
        lease = kube.objects.pop(KEY)
        assert not await leader.take()
        clock.now += 3.0
        kube.objects[KEY] = lease
        assert await leader.take()
        del kube.objects[KEY]
        clock.now += 3.0
        assert not await leader.take()

    asyncio.run(body())


def test_who_is_about_to_end_renews_a_lease_and_makes_none_anew() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        leader = elector(kube, "leader", clock)
        await leader.take()
        leader.end()
        assert await leader.take()
        del kube.objects[KEY]
        assert not await leader.take()
        clock.now += 9.9
        assert not await leader.take()

    asyncio.run(body())


def test_a_leader_whose_lease_stays_gone_must_go() -> None:
    async def body() -> None:
        kube, clock = MemoryKube(), Clock()
        leader = elector(kube, "leader", clock)
        await leader.take()
        leader.end()
        del kube.objects[KEY]
        clock.now += 10.0
        with pytest.raises(LeadershipLostError, match="was not renewed for 10 s"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_one_who_never_led_releases_nothing() -> None:
    async def body() -> None:
        kube = MemoryKube()
        await elector(kube, "leader").take()
        await elector(kube, "other").release()
        assert held_by(kube) == "leader"

    asyncio.run(body())


class HangingKube(MemoryKube):
    """An API server whose connections stay open and which never answers, once `hangs`."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().get(kind, namespace, name)

    async def replace(self, obj: KubeObject) -> KubeObject:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().replace(obj)


def test_a_leader_whose_api_server_hangs_must_go() -> None:
    async def body() -> None:
        kube = HangingKube()
        timing = LeaseTiming(duration_seconds=0.3, renew_deadline_seconds=0.2, retry_seconds=0.001)
        name = NamespacedName("system", "kvasir-operator")
        leader = LeaderElector(kube, name, "leader", asyncio.get_running_loop().time, timing)
        await leader.take()
        kube.hangs = True
        with pytest.raises(LeadershipLostError, match=r"was not renewed for 0\.2 s"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


class SlowKube(MemoryKube):
    """Every answer to a write takes `seconds` of the clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    async def create(self, obj: KubeObject) -> KubeObject:
        self.clock.now += self.seconds
        return await super().create(obj)


def test_a_lease_counts_from_before_the_call_that_renewed_it() -> None:
    async def body() -> None:
        clock = Clock()
        leader = elector(SlowKube(clock, seconds=4.0), "leader", clock)
        await leader.take()
        clock.now += 5.9
        leader.check()
        clock.now += 0.1
        with pytest.raises(LeadershipLostError):
            leader.check()

    asyncio.run(body())


def test_who_never_led_or_has_released_may_not_write() -> None:
    async def body() -> None:
        leader = elector(MemoryKube(), "leader")
        with pytest.raises(LeadershipLostError, match="is not held"):
            leader.check()
        await leader.take()
        leader.check()
        await leader.release()
        with pytest.raises(LeadershipLostError, match="is not held"):
            leader.check()

    asyncio.run(body())


RARE = LeaseTiming(duration_seconds=90.0, renew_seconds=60.0, retry_seconds=0.001)
"""Of a Lease that is written seldom; it is looked at as often as any."""


def rare_elector(kube: MemoryKube, clock: Clock, identity: str = "leader") -> LeaderElector:
    return LeaderElector(kube, NamespacedName("system", "kvasir-operator"), identity, clock, RARE)


class CountingKube(MemoryKube):
    """Counts how often it was asked for the Lease, with or without a write."""

    num_looks = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        self.num_looks += 1
        return await super().get(kind, namespace, name)

    async def replace(self, obj: KubeObject) -> KubeObject:
        self.num_looks += 1
        return await super().replace(obj)


async def keep_for_a_while(leader: LeaderElector, kube: CountingKube) -> None:
    """Until it has looked a few times, at one time of its clock."""
    keeping, before = asyncio.create_task(leader.keep()), kube.num_looks
    while kube.num_looks < before + 3 and not keeping.done():  # noqa: ASYNC110, an elector tells nobody of its looks
        await asyncio.sleep(0.001)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.parametrize(("age_seconds", "num_writes"), [(0.0, 0), (59.9, 0), (60.0, 1)])
def test_a_lease_is_written_when_that_is_due_and_looked_at_in_between(age_seconds: float, num_writes: int) -> None:
    async def body() -> None:
        kube, clock = CountingKube(), Clock()
        leader = rare_elector(kube, clock)
        await leader.take()
        before = len(kube.writes)
        clock.now += age_seconds
        await keep_for_a_while(leader, kube)
        assert len(kube.writes) - before == num_writes
        clock.now += 9.9
        leader.check()
        clock.now += 0.1
        with pytest.raises(LeadershipLostError, match="was not renewed for 10 s"):
            leader.check()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_who_renews_a_lease_does_not_read_it_before() -> None:
    async def body() -> None:
        kube = CountingKube()
        leader = elector(kube, "leader")
        await leader.take()
        before = kube.num_looks
        assert await leader.take()
        assert kube.num_looks == before + 1

    asyncio.run(body())


def test_a_lease_that_somebody_labelled_is_renewed_all_the_same() -> None:
    async def body() -> None:
        kube = MemoryKube()
        leader = elector(kube, "leader")
        await leader.take()
        await kube.replace({**kube.objects[KEY], "metadata": {**kube.objects[KEY]["metadata"], "labels": {"a": "b"}}})
        assert await leader.take()
        assert (held_by(kube), kube.objects[KEY]["metadata"]["labels"]) == ("leader", {"a": "b"})

    asyncio.run(body())


def test_a_lease_that_is_written_seldom_is_missed_as_soon_as_any() -> None:
    async def body() -> None:
        kube, clock = CountingKube(), Clock()
        leader = rare_elector(kube, clock)
        await leader.take()
        del kube.objects[KEY]
        await keep_for_a_while(leader, kube)
        assert KEY not in kube.objects
        clock.now += 4.0
        await keep_for_a_while(leader, kube)
        assert held_by(kube) == "leader"
        await rob(kube)
        with pytest.raises(LeadershipLostError, match="usurper took Lease"):
            await leader.keep()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_lease_that_can_be_read_and_not_renewed_is_given_up_before_another_may_take_it() -> None:
    class ReadOnlyKube(CountingKube):
        async def replace(self, obj: KubeObject) -> KubeObject:
            self.num_looks += 1
            raise KubeUnavailableError("no writes")

    async def body() -> None:
        kube, clock = ReadOnlyKube(), Clock()
        leader, successor = rare_elector(kube, clock), rare_elector(kube, clock, "successor")
        await leader.take()
        await successor.look()
        clock.now += 59.0
        await keep_for_a_while(leader, kube)
        clock.now += 10.0
        with pytest.raises(LeadershipLostError, match="was not renewed for 10 s"):
            await leader.keep()
        assert not await successor.take()

    asyncio.run(asyncio.wait_for(body(), 10))
