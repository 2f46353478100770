"""What holds of every rollout, whatever fails, lags, changes or is taken back on the way."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.operator.rollout.simulated_cluster import SimulatedCluster

from kvasir_operator.api.model import CanarySpec, RolloutSpec
from kvasir_operator.rollout.goal import RolloutPhase

REVISIONS = ["a", "b", "c", "d"]
BROKEN = "d"
SERVED = ("serve",)
SPLIT = ("prefill", "decode")
SURGES: list[tuple[int | str, int | str]] = [
    (1, 0),
    (0, 1),
    (2, 1),
    ("25%", "25%"),
    ("100%", 0),
    ("1%", "1%"),
    (0, "50%"),
]


class Rollouts(RuleBasedStateMachine):
    """Pods are seen late, except that their failures are seen at once: what nobody knew of yet is nobody's doing."""

    @initialize(
        roles=st.sampled_from([SERVED, SPLIT]),
        counts=st.tuples(st.integers(1, 7), st.integers(1, 7)),
        surge=st.sampled_from(SURGES),
    )
    def begin(self, roles: tuple[str, ...], counts: tuple[int, int], surge: tuple[int | str, int | str]) -> None:
        desired = dict(zip(roles, counts, strict=False))
        self.cluster = SimulatedCluster(desired, RolloutSpec(*surge), broken={BROKEN})
        self.cluster.settle()

    @rule(revision=st.sampled_from(REVISIONS), weight=st.sampled_from([None, None, 10, 50]))
    def change_the_spec(self, revision: str, weight: int | None) -> None:
        spec = self.cluster.spec
        canary = None if weight is None else CanarySpec(weight)
        self.cluster.revision = revision
        self.cluster.spec = RolloutSpec(spec.max_surge, spec.max_unavailable, canary=canary)

    @rule(role=st.integers(0, 1), wanted=st.integers(1, 7))
    def scale(self, role: int, wanted: int) -> None:
        names = list(self.cluster.desired)
        self.cluster.desired[names[role % len(names)]] = wanted

    @rule()
    def controllers_catch_up(self) -> None:
        self.cluster.catch_up()

    @rule()
    def the_operator_catches_up(self) -> None:
        self.cluster.observe()

    @rule(pick=st.integers(0, 99), num_pods=st.integers(1, 3))
    def pods_load(self, pick: int, num_pods: int) -> None:
        keys = list(self.cluster.deployments)
        self.cluster.load(keys[pick % len(keys)], num_pods)

    @rule(pick=st.integers(0, 99), state=st.sampled_from(["failing", "gone quiet"]))
    def a_pod_fails(self, pick: int, state: str) -> None:
        ready = [each for each in self.cluster.deployments.values() if "ready" in each.pods]
        if ready:
            pods = ready[pick % len(ready)].pods
            pods[pods.index("ready")] = state  # type: ignore[call-overload]
            self.cluster.observe()

    @rule()
    def nodes_are_full(self) -> None:
        self.cluster.is_full = True

    @rule()
    def there_are_nodes_again(self) -> None:
        self.cluster.is_full = False
        self.cluster.bind()

    @rule()
    def a_pass_that_is_left(self) -> None:
        serving = self.cluster.known_to_serve()
        self.cluster.run_pass(is_left=True)
        for role, (fewest, _) in self.cluster.limits().items():
            assert self.cluster.serving()[role] >= min(serving[role], fewest)

    @rule()
    def a_pass(self) -> None:
        serving, asked_for = self.cluster.known_to_serve(), self.cluster.asked_for()
        self.cluster.run_pass()
        for role, (fewest, most) in self.cluster.limits().items():
            assert self.cluster.serving()[role] >= min(serving[role], fewest)
            assert self.cluster.asked_for()[role] <= max(asked_for.get(role, 0), most)

    @rule()
    def a_pass_that_sees_everything(self) -> None:
        self.cluster.observe()
        existing = self.cluster.existing()
        self.a_pass()
        for role, (_, most) in self.cluster.limits().items():
            assert self.cluster.existing()[role] <= max(existing[role], most)

    def teardown(self) -> None:
        """Left alone with a revision that works, every rollout ends, and then writes nothing."""
        if self.cluster.revision == BROKEN:
            self.cluster.revision = "a"
        spec = self.cluster.spec
        self.cluster.spec = RolloutSpec(spec.max_surge, spec.max_unavailable)
        plan = self.cluster.settle()
        assert plan.phase is RolloutPhase.COMPLETE
        assert {key.revision for key, number in plan.replicas.items() if number} == {self.cluster.revision}
        assert self.cluster.serving() == self.cluster.desired
        assert len({key.revision for key in self.cluster.deployments}) <= 1 + spec.history_limit


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
