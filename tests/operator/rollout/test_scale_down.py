"""Which pods go when a service shrinks, and what is written for it."""

import asyncio
from collections.abc import Iterable
from typing import Any

from tests.operator.cluster_objects import deployment, member, pod, stateful_set
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KubeForbiddenError
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.replicas import replicas_of
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.observed import ObservedWorkload
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.rollout.scale_down import (
    DELETION_COST,
    Shrink,
    deletion_costs,
    find_shrinks,
    going,
    mark_least_work,
    read_shrinking,
)
from kvasir_operator.rollout.workload import Workload, WorkloadKey

KEY = WorkloadKey("serve", "aaaa")


def engine(name: str, cost: str | None = None, **fields: Any) -> KubeObject:
    obj = pod(name, **fields)
    if cost is not None:
        obj["metadata"]["annotations"] = {DELETION_COST: cost}
    return obj


def workload(replicas: int, pods: Iterable[KubeObject] = ()) -> ObservedWorkload:
    return ObservedWorkload(Workload(KEY, replicas=replicas), (deployment(replicas=replicas),), tuple(pods))


def shrink_of(pods: tuple[KubeObject, ...], num_going: int) -> Shrink:
    return Shrink(KEY, tuple(replicas_of(pods)), num_going)


def shrinks(before: int, after: int, pods: Iterable[KubeObject] = ()) -> list[Shrink]:
    """Of a workload that a rollout gives `after` pods."""
    plan = RolloutPlan(RolloutPhase.PROGRESSING, "aaaa", number=1, replicas={KEY: after})
    return find_shrinks(plan, [workload(before, pods)])


def test_only_fewer_pods_are_a_shrink() -> None:
    assert [shrink.num_going for shrink in shrinks(5, 2)] == [3]
    assert shrinks(2, 2) == shrinks(2, 5) == []


def test_where_all_go_nothing_is_chosen() -> None:
    assert shrinks(5, 0) == []


def test_a_former_revision_that_gives_way_shrinks_too() -> None:
    old, new = WorkloadKey("serve", "old"), WorkloadKey("serve", "new")
    plan = RolloutPlan(RolloutPhase.PROGRESSING, "new", number=2, replicas={old: 1, new: 2})
    pods = (engine("a"), engine("b"))
    observed = [
        ObservedWorkload(Workload(old, replicas=2), (deployment(),), pods),
        ObservedWorkload(Workload(new, replicas=1), (deployment(),), (engine("c"),)),
    ]
    assert find_shrinks(plan, observed) == [Shrink(old, tuple(replicas_of(pods)), 1)]


def test_pods_that_leave_already_are_not_chosen_from() -> None:
    [shrink] = shrinks(2, 1, pods=[engine("a"), engine("b"), engine("gone", leaving=True)])
    assert [replica.name for replica in shrink.replicas] == ["a", "b"]


def test_pods_that_an_earlier_shrink_has_not_taken_yet_are_counted_again() -> None:
    [shrink] = shrinks(2, 1, pods=[engine("a"), engine("b"), engine("c")])
    assert shrink.num_going == 2


def test_the_least_busy_go_first() -> None:
    pods = (engine("a"), engine("b"), engine("c"))
    assert deletion_costs(shrink_of(pods, 2), {"a": 7, "b": 0, "c": 3}) == {"b": "-2", "c": "-1"}


def test_a_pod_that_is_not_ready_goes_before_any_that_works() -> None:
    pods = (engine("idle"), engine("loading", ready=False))
    assert deletion_costs(shrink_of(pods, 1), {"idle": 0}) == {"loading": "-1"}


def test_a_pod_that_does_not_report_counts_as_the_busiest() -> None:
    assert deletion_costs(shrink_of((engine("mute"), engine("busy")), 1), {"busy": 99}) == {"busy": "-1"}


def test_among_equals_the_youngest_goes() -> None:
    old, young = engine("old"), engine("young")
    young["metadata"]["creationTimestamp"] = "2026-11-20T11:00:00Z"
    assert deletion_costs(shrink_of((old, young), 1), {"old": 2, "young": 2}) == {"young": "-1"}


def test_without_an_answer_kubernetes_chooses() -> None:
    assert deletion_costs(shrink_of((engine("a"), engine("b")), 1), {}) == {}


def test_what_an_earlier_shrink_left_is_taken_away_and_what_holds_is_not_written_again() -> None:
    pods = (engine("was", cost="-1"), engine("is", cost="-1"))
    assert deletion_costs(shrink_of(pods, 1), {"was": 5, "is": 0}) == {"was": None}


def marked(kube: MemoryKube, *pods: KubeObject) -> dict[str, str | None]:
    """Deletion costs in `kube` after a shrink of `pods` to one, of whom the first is the busiest."""

    async def read_work(asked: Iterable[KubeObject]) -> dict[str, int]:
        return {each["metadata"]["name"]: -rank for rank, each in enumerate(asked)}

    for each in pods:
        kube.objects[("Pod", "models", each["metadata"]["name"])] = {"apiVersion": "v1", "kind": "Pod", **each}
    shrinking = [shrink_of(pods, len(pods) - 1)]
    work = asyncio.run(read_shrinking(shrinking, read_work))
    asyncio.run(mark_least_work(kube, shrinking, work))
    stored = (obj["metadata"] for obj in kube.objects.values())
    return {metadata["name"]: metadata.get("annotations", {}).get(DELETION_COST) for metadata in stored}


def test_the_choice_is_written_on_the_pods() -> None:
    kube = MemoryKube()
    assert marked(kube, engine("a", cost="-1"), engine("b"), engine("c")) == {"a": None, "b": "-1", "c": "-2"}
    assert len(kube.writes) == 3


def test_a_pod_that_may_not_be_marked_does_not_hold_up_the_others() -> None:
    kube = MemoryKube()
    kube.failures = [KubeForbiddenError("pods is forbidden", 403)]
    assert marked(kube, engine("a"), engine("b"), engine("c")) == {"a": None, "b": None, "c": "-2"}


def groups(*is_ready: bool) -> tuple[ObservedWorkload, list[KubeObject]]:
    """A workload of groups, the first pods of which are ready or not, and these first pods."""
    sets = [stateful_set(index) for index in range(len(is_ready))]
    leaders = [member(0, each, ready=ready) for each, ready in zip(sets, is_ready, strict=True)]
    pods = (*leaders, *(member(1, each) for each in sets))
    return ObservedWorkload(Workload(KEY, replicas=len(sets)), tuple(sets), pods), leaders


def test_the_least_busy_groups_go_by_what_their_first_pods_report() -> None:
    observed, leaders = groups(True, True, False)
    [shrink] = find_shrinks(RolloutPlan(RolloutPhase.PROGRESSING, "aaaa", number=1, replicas={KEY: 1}), [observed])
    asked: list[KubeObject] = []

    async def read_work(pods: Iterable[KubeObject]) -> dict[str, int]:
        asked.extend(pods)
        return {leaders[0]["metadata"]["name"]: 7, leaders[1]["metadata"]["name"]: 3}

    work = asyncio.run(read_shrinking([shrink], read_work))
    assert asked == leaders[:2]
    assert [replica.name for replica in going(shrink, work)] == ["llama-serve-aaaa-2", "llama-serve-aaaa-1"]
    assert deletion_costs(shrink, work) == {}
