"""Which pods go when a service shrinks, and what is written for it."""

import asyncio
from collections.abc import Iterable
from typing import Any

from kvasir_operator.errors import KubeForbiddenError
from kvasir_operator.kinds import KubeObject
from kvasir_operator.observe import Observed
from kvasir_operator.plan import Apply, Cause, Plan
from kvasir_operator.scale_down import DELETION_COST, Shrink, deletion_costs, find_shrinks, mark_least_work

from .cluster_objects import deployment, pod
from .memory_kube import MemoryKube


def engine(name: str, replica_set: str = "rs-1", cost: str | None = None, **fields: Any) -> KubeObject:
    obj = pod(name, **fields)
    obj["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "uid": replica_set, "controller": True}]
    if cost is not None:
        obj["metadata"]["annotations"] = {DELETION_COST: cost}
    return obj


def shrinks(before: int, after: int | None, role: str = "serve", pods: Iterable[KubeObject] = ()) -> list[Shrink]:
    wanted, live = deployment(role, after or 0), deployment(role, before)
    if after is None:
        del wanted["spec"]["replicas"]
    return find_shrinks(Plan(applies=(Apply(wanted, Cause.CHANGED),)), Observed((live,), tuple(pods)))


def test_only_a_smaller_number_of_engines_is_a_shrink() -> None:
    assert [shrink.num_going for shrink in shrinks(5, 2)] == [3]
    assert shrinks(2, 2) == shrinks(2, 5) == []
    assert shrinks(2, 1, role="router") == []


def test_where_all_go_or_an_autoscaler_decides_nothing_is_chosen() -> None:
    assert shrinks(5, 0) == []
    assert shrinks(5, None) == []


def test_a_new_deployment_is_no_shrink() -> None:
    created = Plan(applies=(Apply(deployment(replicas=1), Cause.CREATED),))
    assert find_shrinks(created, Observed()) == []


def test_pods_of_other_roles_and_leaving_ones_are_not_chosen_from() -> None:
    pods = [engine("a"), engine("b"), engine("gone", leaving=True), pod("router", "router")]
    [shrink] = shrinks(2, 1, pods=pods)
    assert [each["metadata"]["name"] for each in shrink.pods] == ["a", "b"]


def test_the_least_busy_go_first() -> None:
    pods = (engine("a"), engine("b"), engine("c"))
    assert deletion_costs(Shrink(pods, 2), {"a": 7, "b": 0, "c": 3}) == {"b": "-2", "c": "-1"}


def test_a_pod_that_is_not_ready_goes_before_any_that_works() -> None:
    pods = (engine("idle"), engine("loading", ready=False))
    assert deletion_costs(Shrink(pods, 1), {"idle": 0}) == {"loading": "-1"}


def test_a_pod_that_does_not_tell_counts_as_the_busiest() -> None:
    assert deletion_costs(Shrink((engine("mute"), engine("busy")), 1), {"busy": 99}) == {"busy": "-1"}


def test_among_equals_the_youngest_goes() -> None:
    old, young = engine("old"), engine("young")
    young["metadata"]["creationTimestamp"] = "2026-11-20T11:00:00Z"
    assert deletion_costs(Shrink((old, young), 1), {"old": 2, "young": 2}) == {"young": "-1"}


def test_during_a_rollout_each_replica_set_has_its_own_choice() -> None:
    pods = (engine("a1"), engine("a2"), engine("b1", "rs-2"), engine("b2", "rs-2"))
    work = {"a1": 1, "a2": 2, "b1": 9, "b2": 8}
    assert deletion_costs(Shrink(pods, 1), work) == {"a1": "-1", "b2": "-1"}


def test_without_an_answer_kubernetes_chooses() -> None:
    assert deletion_costs(Shrink((engine("a"), engine("b")), 1), {}) == {}


def test_what_an_earlier_shrink_left_is_taken_away_and_what_holds_is_not_written_again() -> None:
    pods = (engine("was", cost="-1"), engine("is", cost="-1"))
    assert deletion_costs(Shrink(pods, 1), {"was": 5, "is": 0}) == {"was": None}


def marked(kube: MemoryKube, *pods: KubeObject) -> dict[str, str | None]:
    """Deletion costs in `kube` after a shrink of `pods` to one, of whom the first is the busiest."""

    async def read_work(asked: Iterable[KubeObject]) -> dict[str, int]:
        return {each["metadata"]["name"]: -rank for rank, each in enumerate(asked)}

    for each in pods:
        kube.objects[("Pod", "models", each["metadata"]["name"])] = {"apiVersion": "v1", "kind": "Pod", **each}
    asyncio.run(mark_least_work(kube, [Shrink(pods, len(pods) - 1)], read_work))
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
