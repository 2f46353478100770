"""Deployments and pods as Kubernetes moves them, and an operator that sees them late."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvasir_operator.api.model import RolloutSpec
from kvasir_operator.rollout.goal import role_limits
from kvasir_operator.rollout.plan import RolloutPlan, plan_rollout
from kvasir_operator.rollout.workload import Workload, WorkloadKey

PodState = Literal["unbound", "loading", "ready", "failing", "gone quiet"]
# A ReplicaSet's order: pods that no node has go first, then those that are not ready.
_GOING_FIRST: tuple[PodState, ...] = ("unbound", "failing", "loading", "gone quiet", "ready")


@dataclass
class SimulatedDeployment:
    replicas: int = 0
    number: int = 0
    weight: int | None = None
    pods: list[PodState] = field(default_factory=list)
    seen: list[PodState] = field(default_factory=list)
    """Pods as the operator last saw them."""

    def catch_up(self, made: PodState) -> None:
        """As its controllers do."""
        while len(self.pods) > self.replicas:
            self.pods.remove(min(self.pods, key=_GOING_FIRST.index))
        self.pods += [made] * (self.replicas - len(self.pods))

    @property
    def num_bound(self) -> int:
        """Pods that hold an accelerator."""
        return len(self.pods) - self.pods.count("unbound")

    def seen_as(self, key: WorkloadKey) -> Workload:
        unbound = self.seen.count("unbound")
        useless = unbound + self.seen.count("loading") + self.seen.count("failing")
        trouble = "it fails" if "failing" in self.seen else None
        ready = self.seen.count("ready")
        return Workload(
            key,
            self.number,
            self.replicas,
            len(self.seen),
            ready,
            useless,
            unbound,
            traffic_weight=self.weight,
            trouble=trouble,
        )


@dataclass
class SimulatedCluster:
    """One service. `broken`: revisions whose pods fail instead of becoming ready; `is_full`: no node takes a pod."""

    desired: dict[str, int]
    spec: RolloutSpec = field(default_factory=RolloutSpec)
    revision: str = "a"
    broken: set[str] = field(default_factory=set)
    is_full: bool = False
    deployments: dict[WorkloadKey, SimulatedDeployment] = field(default_factory=dict)

    def plan(self, blocked: str | None = None, *, is_waiting: bool = False) -> RolloutPlan:
        workloads = [each.seen_as(key) for key, each in self.deployments.items()]
        return plan_rollout(self.revision, self.desired, self.spec, workloads, blocked, is_waiting=is_waiting)

    def run_pass(self, *, is_left: bool = False) -> RolloutPlan:
        """One pass of the operator: plans from what it saw, and writes.

        `is_left`: of the current revision alone, as an operator that ends then, or has other changes to apply first.
        """
        plan = self.plan()
        if is_left:
            self._write(plan, {key: number for key, number in plan.replicas.items() if key.revision == self.revision})
            return plan
        for key in plan.expired:
            assert not self.deployments.pop(key).pods, f"{key} was deleted while it had pods"
        self._write(plan, plan.replicas)
        return plan

    def _write(self, plan: RolloutPlan, written: Mapping[WorkloadKey, int]) -> None:
        for key, replicas in written.items():
            deployment = self.deployments.setdefault(key, SimulatedDeployment())
            deployment.replicas = replicas
            if key.revision == self.revision:
                deployment.number, deployment.weight = plan.number, plan.traffic_weight

    def is_at_rest(self) -> bool:
        """Whether a pass would write nothing."""
        plan = self.plan()
        replicas = {key: each.replicas for key, each in self.deployments.items()}
        current = [each for key, each in self.deployments.items() if key.revision == self.revision]
        return (plan.replicas, plan.expired) == (replicas, frozenset()) and all(
            (each.number, each.weight) == (plan.number, plan.traffic_weight) for each in current
        )

    def catch_up(self) -> None:
        for each in self.deployments.values():
            each.catch_up("unbound" if self.is_full else "loading")

    def bind(self) -> None:
        """There is a node for every pod."""
        for each in self.deployments.values():
            each.pods = ["loading" if pod == "unbound" else pod for pod in each.pods]

    def observe(self) -> None:
        for each in self.deployments.values():
            each.seen = list(each.pods)

    def load(self, key: WorkloadKey, num_pods: int = 1) -> None:
        """Pods finish loading, or fail at it."""
        pods = self.deployments[key].pods
        for _ in range(min(num_pods, pods.count("loading"))):
            pods[pods.index("loading")] = "failing" if key.revision in self.broken else "ready"

    def settle(self, num_rounds: int = 200) -> RolloutPlan:
        """Everything catches up until a pass writes nothing; failing pods of former revisions stay so."""
        self.is_full = False
        for _ in range(num_rounds):
            self.catch_up()
            self.bind()
            for key, each in self.deployments.items():
                mended = ("gone quiet", "failing") if key.revision == self.revision else ("gone quiet",)
                each.pods = ["loading" if pod in mended else pod for pod in each.pods]
                self.load(key, len(each.pods))
            self.observe()
            if self.is_at_rest():
                return self.plan()
            self.run_pass()
        raise AssertionError(f"not at rest after {num_rounds} rounds: {self}")

    def serving(self) -> dict[str, int]:
        """Pods by role that serve and were not told to go, in revisions that have such a pod in every role."""
        return {role: sum(self._serving(role)) for role in self.desired}

    def asked_for(self) -> dict[str, int]:
        return {role: sum(each.replicas for key, each in self._of(role)) for role in self.desired}

    def existing(self) -> dict[str, int]:
        """Pods that have a node, or that may come to have one."""
        return {role: sum(max(each.replicas, each.num_bound) for _, each in self._of(role)) for role in self.desired}

    def limits(self) -> Mapping[str, tuple[int, int]]:
        """(fewest that serve, most that exist) by role."""
        resolved = {role: role_limits(wanted, self.spec) for role, wanted in self.desired.items()}
        return {role: (each.min_available, each.max_total) for role, each in resolved.items()}

    def known_to_serve(self) -> dict[str, int]:
        """As far as the operator has seen it: what became ready since then is not its doing either."""
        return {role: sum(self._serving(role, is_seen=True)) for role in self.desired}

    def _serving(self, role: str, is_seen: bool = False) -> Iterator[int]:
        for key, each in self._of(role):
            alike = [other for name, other in self.deployments.items() if name.revision == key.revision]
            if all("ready" in other.pods and (not is_seen or "ready" in other.seen) for other in alike):
                ready = each.pods.count("ready")
                yield min(each.replicas, ready, each.seen.count("ready") if is_seen else ready)

    def _of(self, role: str) -> list[tuple[WorkloadKey, SimulatedDeployment]]:
        return [(key, each) for key, each in self.deployments.items() if key.role == role]
