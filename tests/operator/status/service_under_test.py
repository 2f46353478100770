"""A service's status from its Deployments and pods, as a pass derives it."""

from collections.abc import Sequence
from typing import Any

from tests.operator.cluster_objects import NOW, deployment, service

from kvasir_operator.api.labels import REVISION_LABEL
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.status.conditions import Situation
from kvasir_operator.status.roles import role_state
from kvasir_operator.status.status import derive_status

KubeObject = dict[str, Any]
URL = "http://llama-router.models.svc:8080/v1"
SETTLED = Situation("llama-8b", rollout=RolloutPlan(RolloutPhase.COMPLETE, "aaaa"))


def status_of(
    engines: Sequence[KubeObject],
    pods: Sequence[KubeObject],
    situation: Situation = SETTLED,
    previous: KubeObject | None = None,
    router: KubeObject | None = None,
) -> KubeObject:
    """Of a service with a router of its own. `engines`: Deployments of engine roles, as `derived` takes them."""
    return derived([router or deployment("router"), *engines], pods, situation, previous)


def derived(
    deployments: Sequence[KubeObject],
    pods: Sequence[KubeObject],
    situation: Situation = SETTLED,
    previous: KubeObject | None = None,
) -> KubeObject:
    """`deployments`: of a role's revisions the current one first; pods wanted are as many."""
    by_role: dict[str, list[KubeObject]] = {}
    for each in deployments:
        by_role.setdefault(each["metadata"]["labels"]["serving.kvasir.dev/role"], []).append(each)
    roles = [role_state(each, sum(one["spec"]["replicas"] for one in each), pods) for each in by_role.values()]
    return derive_status(service(status=previous), roles, situation, URL, NOW)


def condition(status: KubeObject, name: str) -> tuple[str, str]:
    found = find(status, name)
    return found["status"], found["reason"]


def find(status: KubeObject, name: str) -> KubeObject:
    (found,) = (each for each in status["conditions"] if each["type"] == name)
    return dict(found)


def of_revision(pod: KubeObject, revision: str) -> KubeObject:
    pod["metadata"]["labels"][REVISION_LABEL] = revision
    return pod
