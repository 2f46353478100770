"""One role of a service: its fleet, and what Prometheus knows of it, over the last minute."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.autoscaling.fleet import Fleet, Replica, Stage
from benchmarks.autoscaling.view import FleetView, ReplicaView
from benchmarks.routing.job import Job

_WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class _Latency:
    at: float
    seconds: float


class Role:
    """`wanted`: all numbers of replicas that were wanted, in order."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.wanted = [fleet.num_wanted]
        self._arrivals: deque[_Arrival] = deque()
        self._ttft: deque[_Latency] = deque()
        self._itl: deque[_Latency] = deque()
        self._num_output, self._num_finished = 0.0, 0

    def arrived(self, now: float, uncached_tokens: int) -> None:
        self._arrivals.append(_Arrival(now, uncached_tokens))

    def first_token(self, now: float, seconds: float) -> None:
        self._ttft.append(_Latency(now, seconds))

    def finished(self, job: Job, now: float) -> None:
        self._itl.append(_Latency(now, itl_seconds(job, now)))
        self._num_output, self._num_finished = self._num_output + job.num_output_tokens, self._num_finished + 1

    def view(self, now: float, held: Sequence[Job]) -> FleetView:
        """`held`: by routers."""
        for seen in (self._arrivals, self._ttft, self._itl):
            while seen and seen[0].at < now - _WINDOW_SECONDS:
                seen.popleft()
        tokens = [each.uncached_tokens for each in self._arrivals]
        return FleetView(
            now,
            self.fleet.num_wanted,
            tuple(_replica_view(each, now) for each in self.fleet.in_stage(Stage.SERVING) if each.scrapes),
            len(held),
            sum(job.num_input_tokens for job in held),
            len(self._itl) / min(_WINDOW_SECONDS, now),
            sum(tokens) / min(_WINDOW_SECONDS, now),
            fmean(tokens) if tokens else 0.0,
            self._num_output / self._num_finished if self._num_finished else 0.0,
            _p90(self._ttft),
            _p90(self._itl),
        )


def itl_seconds(job: Job, finished_at: float) -> float:
    """Between two tokens, on average."""
    return (finished_at - job.first_token_at) / max(1, job.num_output_tokens - 1)


def _p90(latencies: Iterable[_Latency]) -> float | None:
    ascending = sorted(each.seconds for each in latencies)
    return ascending[int(len(ascending) * 0.9)] if ascending else None


def _replica_view(replica: Replica, now: float) -> ReplicaView:
    scrapes, last, engine = replica.scrapes, replica.scrapes[-1], replica.engine
    return ReplicaView(
        replica.name,
        now - replica.serves_at,
        fmean(each.kv_used_tokens for each in scrapes),
        last.kv_used_tokens,
        max(each.kv_used_tokens for each in scrapes),
        engine.model.kv_capacity_tokens,
        fmean(each.num_running for each in scrapes),
        fmean(each.num_waiting for each in scrapes),
        max(each.num_waiting for each in scrapes),
        fmean(each.uncached_tokens for each in scrapes),
        last.uncached_tokens,
        engine.prefill_tokens_per_second,
        1 / engine.steps_per_second if engine.steps_per_second else 0.0,
    )
