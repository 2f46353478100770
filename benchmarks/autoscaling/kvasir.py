"""The operator's own decision, as it runs."""

from benchmarks.autoscaling.view import FleetView, ReplicaView

from kvasir_operator.api.model import SLO, AutoscalingSpec
from kvasir_operator.api.quantity import Duration
from kvasir_operator.autoscaling.decide import decide
from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample
from kvasir_operator.autoscaling.situation import Memory, RoleSituation

_WINDOW_SECONDS = 60.0
"""Of the view's rates."""


class Kvasir:
    interval_seconds = 15.0

    def __init__(self, ttft_seconds: float, itl_seconds: float, startup_seconds: float, most: int) -> None:
        slo = SLO(*(Duration(f"{1000 * seconds:.0f}ms") for seconds in (ttft_seconds, itl_seconds)))
        self._spec = AutoscalingSpec(most, slo=slo)
        self._startup_seconds = startup_seconds
        self._memory = Memory()
        self._backlogs: list[tuple[float, float]] = [(0.0, 0.0)]

    def wanted(self, view: FleetView) -> int:
        situation = RoleSituation(
            "serve",
            self._spec,
            view.now,
            view.wanted,
            {replica.name: replica.serves_seconds for replica in view.replicas},
            _sample(view, self._backlog_growth(view)),
            startup_seconds=self._startup_seconds,
        )
        verdict, self._memory = decide(situation, self._memory)
        return verdict.replicas

    def _backlog_growth(self, view: FleetView) -> float:
        """Uncached tokens a second, over the window."""
        backlog = view.held_tokens + sum(replica.uncached_tokens_now for replica in view.replicas)
        self._backlogs = [each for each in self._backlogs if each[0] >= view.now - _WINDOW_SECONDS]
        self._backlogs.append((view.now, backlog))
        begun_at, before = self._backlogs[0]
        return (backlog - before) / max(view.now - begun_at, 1.0)


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
