"""Children that are not as they were applied: a person's edit, a mutating policy, a controller that writes back."""

import asyncio
from typing import Any

import pytest
from tests.operator.cluster_objects import child, service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.apply.apply import apply_plan
from kvasir_operator.apply.foreign_writes import ForeignWrites, LearnedMutations, Settled
from kvasir_operator.apply.plan import make_plan, stamped
from kvasir_operator.errors import AdmissionFailedError, KubeUnavailableError
from kvasir_operator.kube.kinds import DEPLOYMENT, KubeObject

KEY = ("Deployment", "models", "d")


def deployment(image: str = "runtime:1", replicas: int = 2) -> KubeObject:
    containers = [{"name": "engine", "image": image}]
    return stamped(
        child("Deployment", "d", spec={"replicas": replicas, "template": {"spec": {"containers": containers}}})
    )


def mirrored(obj: KubeObject) -> KubeObject:
    """A policy that takes images from a mirror and adds a container."""
    pod = obj["spec"]["template"]["spec"]
    images = [{**each, "image": f"mirror.example.com/{each['image']}"} for each in pod["containers"]]
    return {**obj, "spec": {**obj["spec"], "template": {"spec": {"containers": [*images, {"name": "proxy"}]}}}}


class Cluster:
    """One child in a cluster, the operator's memory of it, and a clock."""

    def __init__(self) -> None:
        self.kube = MemoryKube()
        self.now = 1000.0
        self.restart()

    def restart(self) -> None:
        self.foreign = ForeignWrites(self.kube, lambda: self.now)

    def run_pass(self, desired: KubeObject | None = None) -> Settled:
        return asyncio.run(self._pass(desired or deployment()))

    async def _pass(self, desired: KubeObject) -> Settled:
        children = [obj for key, obj in self.kube.objects.items() if key == KEY]
        settled = await self.foreign.settle(make_plan([desired], children, service()), children)
        applied = await apply_plan(self.kube, "models", settled.plan)
        self.foreign.remember(settled.plan, applied.written)
        return settled

    def edit(self, manager: str = "kubectl", **spec: Any) -> None:
        live = self.kube.objects[KEY]
        fields = {"f:spec": {f"f:{name}": {} for name in spec}}
        metadata = {**live["metadata"], "managedFields": [{"manager": manager, "fieldsV1": fields}]}
        self.kube.objects[KEY] = {**live, "metadata": metadata, "spec": {**live["spec"], **spec}}

    @property
    def num_writes(self) -> int:
        return len(self.kube.writes)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_what_a_policy_changes_on_the_way_in_is_learned_from_the_answer(cluster: Cluster) -> None:
    cluster.kube.admission = mirrored
    for _ in range(3):
        cluster.run_pass()
    assert (cluster.num_writes, cluster.kube.num_dry_runs) == (1, 0)


def test_after_a_restart_a_dry_run_tells_the_same_without_a_write(cluster: Cluster) -> None:
    cluster.kube.admission = mirrored
    cluster.run_pass()
    cluster.restart()
    for _ in range(3):
        cluster.run_pass()
    assert (cluster.num_writes, cluster.kube.num_dry_runs) == (1, 1)


def test_an_edit_of_a_child_that_a_policy_changes_is_undone(cluster: Cluster) -> None:
    cluster.kube.admission = mirrored
    cluster.run_pass()
    cluster.edit(replicas=9)
    settled = cluster.run_pass()
    assert [action.drift for action in settled.plan.applies] == [("spec.replicas",)]
    assert cluster.kube.objects[KEY]["spec"]["replicas"] == 2


def test_what_was_learned_of_a_former_wish_does_not_hide_an_edit(cluster: Cluster) -> None:
    cluster.kube.admission = mirrored
    cluster.run_pass()
    cluster.kube.admission = lambda obj: obj
    cluster.run_pass(deployment("runtime:2"))
    cluster.edit(template=mirrored(deployment())["spec"]["template"])
    cluster.run_pass(deployment("runtime:2"))
    [container] = cluster.kube.objects[KEY]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "runtime:2"


def test_a_webhook_that_allows_no_dry_run_is_learned_from_a_real_write(cluster: Cluster) -> None:
    cluster.kube.admission = mirrored
    cluster.run_pass()
    cluster.restart()
    cluster.kube.failures = [AdmissionFailedError('admission webhook "m" does not support dry run', 400)]
    for _ in range(3):
        cluster.run_pass()
    assert cluster.num_writes == 2


def test_an_api_server_that_is_away_ends_the_pass(cluster: Cluster) -> None:
    cluster.run_pass()
    cluster.edit(replicas=9)
    cluster.restart()
    cluster.kube.failures = [KubeUnavailableError("down")]
    with pytest.raises(KubeUnavailableError):
        cluster.run_pass()


def test_one_edit_is_undone_at_once_and_looked_at_again(cluster: Cluster) -> None:
    cluster.run_pass()
    cluster.edit(replicas=9)
    settled = cluster.run_pass()
    assert (cluster.num_writes, settled.contested) == (2, ())
    assert cluster.run_pass().retry_seconds == 1.0


def test_who_writes_back_each_time_meets_growing_waits_and_is_named(cluster: Cluster) -> None:
    cluster.run_pass()
    for _ in range(1000):
        cluster.edit("scaler", replicas=9)
        settled = cluster.run_pass()
        cluster.now += 1.0
    assert cluster.num_writes == 1 + 11  # at 0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 811 s
    [message] = settled.contested
    assert message.startswith("Deployment d: scaler keeps writing spec.replicas: ")


def test_a_contest_is_over_once_the_other_has_been_quiet(cluster: Cluster) -> None:
    cluster.run_pass()
    for _ in range(3):
        cluster.edit("scaler", replicas=9)
        settled = cluster.run_pass()
        cluster.now += settled.retry_seconds or 0.0
    settled = cluster.run_pass()
    assert (len(settled.contested), settled.retry_seconds) == (1, 60.0)
    cluster.now += 60.0
    assert cluster.run_pass() == Settled(settled.plan)


def test_a_child_that_is_made_anew_has_no_contest(cluster: Cluster) -> None:
    cluster.run_pass()
    for _ in range(2):
        cluster.edit(replicas=9)
        cluster.run_pass()
    asyncio.run(cluster.kube.delete(DEPLOYMENT, "models", "d", "u"))
    cluster.run_pass()
    cluster.edit(replicas=9)
    cluster.run_pass()
    assert cluster.kube.objects[KEY]["spec"]["replicas"] == 2


def test_what_was_learned_of_a_child_that_is_gone_is_forgotten() -> None:
    learned, one, other = LearnedMutations(), deployment(), deployment(image="runtime:2")
    learned.learn("one", one, mirrored(one))
    learned.learn("other", other, mirrored(other))
    learned.keep({"other"})
    assert learned.expected("one", one) is None
    assert learned.expected("other", other) is not None
