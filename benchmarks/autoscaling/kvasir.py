"""The operator's own decision, as it runs: all roles of the service together, each counted for itself."""

from collections.abc import Mapping, Sequence
from typing import cast

from benchmarks.autoscaling.view import FleetView, ReplicaView

from kvasir_operator.api.model import SLO, AutoscalingSpec
from kvasir_operator.api.quantity import Duration
from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample
from kvasir_operator.autoscaling.situation import Memory, RoleSituation
from kvasir_operator.autoscaling.together import decide_together
from kvasir_operator.desired.roles import EngineRoleName

_WINDOW_SECONDS = 60.0
"""Of the view's rates."""
_INTERVAL_SECONDS, _ASLEEP_SECONDS = 15.0, 1.0


class Kvasir:
    def __init__(self, roles: Sequence[str], spec: AutoscalingSpec, startup_seconds: float) -> None:
        self._spec = spec
        self._startup_seconds = startup_seconds
        self._memories: dict[str, Memory] = {}
        self._backlogs: dict[str, list[tuple[float, float]]] = {role: [(0.0, 0.0)] for role in roles}
        self.interval_seconds = _INTERVAL_SECONDS

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        situations = {role: self._situation(role, view) for role, view in views.items()}
        decided = decide_together(situations, self._memories)
        self._memories = {role: memory for role, (_, memory) in decided.items()}
        wanted = {role: verdict.replicas for role, (verdict, _) in decided.items()}
        self.interval_seconds = _INTERVAL_SECONDS if any(wanted.values()) else _ASLEEP_SECONDS
        return wanted

    def _situation(self, role: str, view: FleetView) -> RoleSituation:
        return RoleSituation(
            cast(EngineRoleName, role),
            self._spec,
            view.now,
            view.wanted,
            {replica.name: replica.serves_seconds for replica in view.replicas},
            _sample(view, self._backlog_growth(role, view)),
            startup_seconds=self._startup_seconds,
        )

    def _backlog_growth(self, role: str, view: FleetView) -> float:
        """Uncached tokens a second, over the window."""
        backlog = view.held_tokens + sum(replica.uncached_tokens_now for replica in view.replicas)
        kept = [each for each in self._backlogs[role] if each[0] >= view.now - _WINDOW_SECONDS]
        self._backlogs[role] = [*kept, (view.now, backlog)]
        begun_at, before = self._backlogs[role][0]
        return (backlog - before) / max(view.now - begun_at, 1.0)


def spec_of(ttft_seconds: float, itl_seconds: float, most: int, *, can_sleep: bool) -> AutoscalingSpec:
    slo = SLO(*(Duration(f"{1000 * seconds:.0f}ms") for seconds in (ttft_seconds, itl_seconds)))
    return AutoscalingSpec(most, 0 if can_sleep else 1, slo=slo, scale_to_zero_after=Duration("5m"))


def _sample(view: FleetView, backlog_growth: float) -> RoleSample:
    """A view tells what arrives; what began is that without what has come to wait."""
    return RoleSample(
        at=view.now,
        replicas=tuple(map(_load, view.replicas)),
        num_held=view.num_held,
        held_tokens=view.held_tokens,
        requests_per_second=view.finished_per_second,
        uncached_tokens_per_second=view.uncached_tokens_per_second,
        computed_tokens_per_second=max(0.0, view.uncached_tokens_per_second - backlog_growth),
        mean_uncached_tokens=view.mean_uncached_tokens,
        mean_output_tokens=view.mean_output_tokens,
        time_to_first_token_p90=view.ttft_p90,
        inter_token_latency_p90=view.itl_p90,
    )


def _load(replica: ReplicaView) -> ReplicaLoad:
    return ReplicaLoad(
        replica.name,
        replica.kv_used_tokens,
        replica.kv_capacity_tokens,
        replica.kv_used_tokens_now,
        replica.num_running,
        replica.num_waiting,
        replica.uncached_tokens_now,
        replica.prefill_tokens_per_second,
    )
