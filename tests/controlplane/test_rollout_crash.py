"""An operator that ends after any of a rollout's writes: the next one goes on, and what serves goes on serving."""

from collections.abc import Iterable

from kvasir_operator.kube.kinds import DEPLOYMENT
from kvasir_operator.observe.waiting import is_ready

from .control_plane import ControlPlane
from .processes import wait_until
from .reconciling import (
    current_engine,
    engine_pods,
    get_children,
    manifest,
    mark_engines_ready,
    portrait,
    roll_out,
    run_pass,
)

ONE = {"replicas": 1, "router": {"replicas": 0}}
NEW = {**ONE, "engine": {"device": "cpu", "maxNumSeqs": 8}}


class Rollouts:
    """Of several services at once; the operator of each ends after so many of its writes, and never again."""

    def __init__(self, control_plane: ControlPlane, namespace: str, ends_after: dict[str, int | None]) -> None:
        self.control_plane = control_plane
        self.namespace = namespace
        self.ends_after = ends_after
        self.num_writes = dict.fromkeys(ends_after, 0)

    def begin(self) -> None:
        for spec in (ONE, NEW):
            for name in self.ends_after:
                self.control_plane.apply(manifest(self.namespace, name, **spec))
            if spec is ONE:
                for name in self.ends_after:
                    roll_out(self.control_plane, self.namespace, name)

    def are_done(self) -> bool:
        """After one more pass of each."""
        done = [self._pass(name) for name in self.ends_after]
        return all(done)

    def _pass(self, name: str) -> bool:
        mark_engines_ready(self.control_plane, self.namespace, name)
        done = run_pass(self.control_plane, self.namespace, name, crash_after=self.ends_after[name])
        self.num_writes[name] += len(done.writes)
        if (left := self.ends_after[name]) is not None:
            self.ends_after[name] = None if done.outcome is None else left - len(done.writes)
        replicas = engine_replicas(self.control_plane, self.namespace, name)
        assert sum(replicas.values()) <= 2
        assert any(map(is_ready, engine_pods(self.control_plane, self.namespace, name)))
        current = current_engine(self.control_plane, self.namespace, name)
        return not done.writes and {each for each, number in replicas.items() if number} == {current}


def engine_replicas(control_plane: ControlPlane, namespace: str, name: str) -> dict[str, int]:
    children = get_children(control_plane, namespace, name)
    engines = {key.name: child for key, child in children.items() if key.kind == DEPLOYMENT and "serve" in key.name}
    return {each: child["spec"]["replicas"] for each, child in engines.items()}


def portraits(control_plane: ControlPlane, namespace: str, names: Iterable[str]) -> dict[str, str]:
    return {name: portrait(control_plane, namespace, name) for name in names}


def test_a_crash_after_any_write_of_a_rollout_changes_nothing_in_the_end(
    control_plane: ControlPlane, namespace: str
) -> None:
    whole = Rollouts(control_plane, namespace, {"whole": None})
    whole.begin()
    wait_until(whole.are_done, 60, "the rollout that nothing ends")
    # How many there are depends a little on what a pass finds: a number beyond the last ends no operator.
    torn = Rollouts(
        control_plane, namespace, {f"torn{number:02d}": number for number in range(1, whole.num_writes["whole"] + 1)}
    )
    torn.begin()
    wait_until(torn.are_done, 120, "the rollouts whose operators ended")
    assert sum(left is None for left in torn.ends_after.values()) >= 0.7 * len(torn.ends_after)
    found = portraits(control_plane, namespace, ["whole", *torn.ends_after])
    assert found == dict.fromkeys(found, found["whole"])
