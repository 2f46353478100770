"""Restarts of replicas, counted over what passes observe."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.cluster_objects import NOW, KubeObject, deployment, leader_worker_set, member, pod, stateful_set

from kvasir_operator.groups.record import RESTARTS, RestartRecord
from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.observe.observe import Observed
from kvasir_operator.status.restarts import RestartCounter

KEY = ServiceKey("models", "llama")


def total(restarts: RestartCounter, role: str = "serve") -> float | None:
    registry = CollectorRegistry()
    registry.register(restarts)
    labels = {"service_namespace": KEY.namespace, "inference_service": KEY.name, "role": role}
    return registry.get_sample_value("kvasir_operator_replica_restarts_total", labels)


def counted(*passes: Observed) -> RestartCounter:
    restarts = RestartCounter()
    for observed in passes:
        restarts.observe(KEY, observed)
    return restarts


def engine(num_restarts: int, name: str = "a", init: int = 0) -> KubeObject:
    containers = [{"name": "engine", "restartCount": num_restarts}]
    return pod(name, containerStatuses=containers, initContainerStatuses=[{"name": "model", "restartCount": init}])


def single(*pods: KubeObject) -> Observed:
    return Observed((deployment(),), pods)


def group(num_restarts: int, make: Callable[..., KubeObject] = stateful_set) -> Observed:
    """Two pods, of which one is being restarted by its kubelet."""
    record = {RESTARTS: RestartRecord(num_restarts, NOW, "an end").text()} if num_restarts else {}
    workload = make(**record)
    failed = {"containerStatuses": [{"name": "engine", "restartCount": 7}]}
    return Observed((workload,), (member(0, workload), member(1, workload, **failed)))


def test_what_a_service_had_been_through_before_is_not_counted() -> None:
    assert total(counted(single(engine(5)))) == 0.0


def test_restarts_of_a_pods_containers_are_added_up() -> None:
    assert total(counted(single(engine(1)), single(engine(3)), single(engine(3, init=1)))) == 3.0


def test_a_pod_that_is_new_since_the_last_pass_has_all_its_restarts_counted() -> None:
    assert total(counted(single(), single(engine(2)))) == 2.0


def test_a_pod_that_went_takes_nothing_back_and_its_successor_begins_at_its_own() -> None:
    assert total(counted(single(engine(0)), single(engine(4)), single(engine(0, "b")))) == 4.0


@pytest.mark.parametrize("make", [stateful_set, leader_worker_set])
def test_a_group_counts_when_the_operator_restarts_it_and_not_by_its_pods(make: Callable[..., KubeObject]) -> None:
    assert total(counted(group(0, make))) == 0.0
    assert total(counted(*(group(number, make) for number in range(3)))) == 2.0


def test_a_groups_count_that_began_anew_goes_on_from_there() -> None:
    assert total(counted(group(0), group(3), group(1))) == 4.0


def test_a_service_that_is_gone_leaves_no_series_and_comes_back_at_nothing() -> None:
    restarts = counted(single(engine(0)), single(engine(2)))
    restarts.forget(KEY)
    restarts.forget(KEY)
    assert total(restarts) is None
    restarts.observe(KEY, single(engine(6)))
    assert total(restarts) == 0.0
