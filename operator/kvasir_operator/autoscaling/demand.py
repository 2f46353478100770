"""How many replicas the demand of one role comes to, as a fraction, before any rule of pace.

Each limit of a replica gives a number of its own and the largest counts: tokens that want a place in the KV cache, the
busiest replica's, requests that want one in the batch, and prompt tokens that want to be computed soon enough. Demand
is absolute, so that replicas on their way are neither wanted twice nor make the others look idle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvasir_operator.autoscaling.capacity import Capacity
from kvasir_operator.autoscaling.drain import queue_ahead, queued_tokens, uncached_tokens
from kvasir_operator.autoscaling.sample import RoleSample

BUSIEST_KV_USAGE = 0.95
"""Above it a replica is about to preempt, however idle the others are."""
PREFILL_UTILIZATION = 0.8
"""Share of its time that a replica may prefill where no time to the first token is asked for, and of what it was seen
to compute at most in any case."""
WAIT_SHARE = 0.5
"""Of the time that an SLO leaves beside a prompt's own prefill, how much sizing lets it wait: requests come in bursts
within the minutes whose mean it sees."""
_TAIL = 0.1
"""The share of requests that may wait longer: latencies are held at the 90th percentile."""
_MOST_SERVERS = 100_000.0
LEAST_BACKLOG_SECONDS = 30.0
"""What waits is worked off beside what arrives in the time that a replica takes to start, and no faster than this: what
those that run will have done by then is no work for another."""


class ScalingReason(StrEnum):
    """Why replicas are changed; shown in status.scaling, events and metrics, so none is ever reworded."""

    KV_CACHE_DEMAND = "KVCacheDemand"
    BUSIEST_REPLICA = "BusiestReplica"
    SLOT_DEMAND = "SlotDemand"
    PREFILL_DEMAND = "PrefillDemand"
    TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
    INTER_TOKEN_LATENCY = "InterTokenLatency"
    FORECAST = "Forecast"
    LOW_DEMAND = "LowDemand"
    HELD_REQUESTS = "HeldRequests"
    OTHER_ROLE_BUSY = "OtherRoleBusy"
    IDLE = "Idle"
    BOUNDS = "ReplicaBounds"


@dataclass(frozen=True)
class Need:
    """Replicas that one limit calls for; `message` names its inputs with their units."""

    replicas: float
    reason: ScalingReason
    message: str


@dataclass(frozen=True)
class Demand:
    """`lasting_replicas`: for what arrives and what is under way alone. What waits will have been worked off: it is no
    sign of what comes, and grows beside a constant overload like a trend."""

    need: Need
    lasting_replicas: float


def demand_of(
    sample: RoleSample,
    capacity: Capacity,
    target_kv_usage: float,
    ttft_seconds: float | None,
    startup_seconds: float,
    starting: Sequence[float] = (),
    backlog_growth: float = 0.0,
    slots: int | None = None,
) -> Demand:
    """The largest of all limits'. `ttft_seconds`: the SLO of the time to the first token; None where there is none.

    `slots`: requests that a replica computes at once; None: no matter how many. `starting`: seconds until each of the
    replicas on their way serves. `backlog_growth`: uncached tokens a second.
    """
    backlog_seconds = max(startup_seconds, LEAST_BACKLOG_SECONDS)
    busiest = _busiest_need(sample)
    kv = _kv_need(sample, capacity, target_kv_usage, backlog_seconds)
    arriving = _arriving_replicas(sample, capacity, ttft_seconds)
    prefill = _prefill_need(sample, capacity, ttft_seconds, backlog_seconds, arriving, starting, backlog_growth)
    needs = [kv, busiest, prefill]
    lasting = [kv_tokens_in_use(sample) / (capacity.kv_tokens * target_kv_usage), busiest.replicas, arriving]
    if slots is not None:
        needs.append(_slot_need(sample, slots, backlog_seconds))
        lasting.append(sum(replica.num_running for replica in sample.replicas) / slots)
    return Demand(max(needs, key=lambda need: need.replicas), max(lasting))


def kv_tokens_in_use(sample: RoleSample) -> float:
    """And still to be generated: half of an answer that runs, on average."""
    num_running = sum(replica.num_running for replica in sample.replicas)
    return sum(replica.kv_used_tokens for replica in sample.replicas) + sample.mean_output_tokens * num_running / 2


def kv_tokens(sample: RoleSample, backlog_seconds: float) -> float:
    """In use, and of what waits its part.

    What waits passes through the cache within `backlog_seconds`, and each request of it stays for as long as those that
    run do, which by Little's law is their number over the rate at which they end.
    """
    waiting = uncached_tokens(sample) + sample.mean_output_tokens * _num_waiting(sample)
    return kv_tokens_in_use(sample) + _share_at_once(sample, backlog_seconds) * waiting


def _num_waiting(sample: RoleSample) -> float:
    return sample.num_held + sum(replica.num_waiting for replica in sample.replicas)


def _share_at_once(sample: RoleSample, backlog_seconds: float) -> float:
    """Of what waits, that is under way at the same time while it is worked off."""
    num_running = sum(replica.num_running for replica in sample.replicas)
    if not num_running or not sample.requests_per_second:
        return 1.0
    return min(1.0, num_running / sample.requests_per_second / backlog_seconds)


def _kv_need(sample: RoleSample, capacity: Capacity, target: float, backlog_seconds: float) -> Need:
    tokens = kv_tokens(sample, backlog_seconds)
    text = f"demand of {tokens:.0f} KV tokens, a replica has {capacity.kv_tokens:.0f} at target {target:g}"
    return Need(tokens / (capacity.kv_tokens * target), ScalingReason.KV_CACHE_DEMAND, text)


def _busiest_need(sample: RoleSample) -> Need:
    """So many that its part of the same load no longer preempts."""
    usage = max((replica.kv_usage for replica in sample.replicas), default=0.0)
    replicas = len(sample.replicas) * usage / BUSIEST_KV_USAGE if usage > BUSIEST_KV_USAGE else 0.0
    text = f"the busiest of {len(sample.replicas)} replicas uses {usage:.2f} of its KV cache"
    return Need(replicas, ScalingReason.BUSIEST_REPLICA, text)


def _slot_need(sample: RoleSample, slots: int, backlog_seconds: float) -> Need:
    """A full batch is no need by itself: what waits for a place in it is."""
    num_running = sum(replica.num_running for replica in sample.replicas)
    num_at_once = num_running + _share_at_once(sample, backlog_seconds) * _num_waiting(sample)
    text = f"{num_running:.0f} requests run and {_num_waiting(sample):.0f} wait, a replica computes {slots} at once"
    return Need(num_at_once / slots, ScalingReason.SLOT_DEMAND, text)


def _arriving_replicas(sample: RoleSample, capacity: Capacity, ttft_seconds: float | None) -> float:
    """That keep the waits of prompts short which arrive as they do now; 0 while no rate is known.

    Waits are those for prefills; answers besides take their part of what a replica gets done.
    """
    rate, arriving = capacity.prefill_tokens_per_second, sample.uncached_tokens_per_second
    if rate is None:
        return 0.0
    most = min(rate, capacity.saturated_tokens_per_second or rate)
    sustained = arriving / most / PREFILL_UTILIZATION
    if ttft_seconds is None:
        return sustained
    mean_seconds = sample.mean_uncached_tokens / rate
    aim_seconds = mean_seconds + WAIT_SHARE * (ttft_seconds - mean_seconds)
    waiting = num_servers_for(arriving / rate, mean_seconds, aim_seconds)
    if waiting is None:
        return sustained
    return waiting if capacity.saturated_tokens_per_second is None else max(waiting, sustained)


def _prefill_need(
    sample: RoleSample,
    capacity: Capacity,
    ttft_seconds: float | None,
    backlog_seconds: float,
    for_arriving: float,
    starting: Sequence[float],
    backlog_growth: float,
) -> Need:
    """What replicas do beyond the load that arrives works off what waits, so that only one of the two is added.

    A queue that grows tells of arrivals sooner than their rate over a minute.
    """
    rate = capacity.prefill_tokens_per_second
    if rate is None:
        return Need(0.0, ScalingReason.PREFILL_DEMAND, "no prefill rate measured yet")
    arriving, queued = sample.uncached_tokens_per_second, queued_tokens(sample, ttft_seconds)
    if queued and backlog_growth > 0:
        arriving = max(arriving, sample.computed_tokens_per_second + backlog_growth)
    most = min(rate, capacity.saturated_tokens_per_second or rate)
    ahead = queue_ahead(queued, arriving, most, len(sample.replicas), starting, backlog_seconds) if queued else 0.0
    with_backlog = (arriving + max(queued, ahead) / backlog_seconds) / most
    text = f"{arriving:.0f} uncached prompt tokens/s, {queued:.0f} queued, a replica computes {most:.0f} tokens/s"
    return Need(max(for_arriving, with_backlog), ScalingReason.PREFILL_DEMAND, text)


def wait_p90_seconds(num_servers: float, load: float, mean_seconds: float) -> float:
    """By Sakasegawa's approximation (1977) of M/M/c, for fractions of servers too: more of them wait less at the same
    utilisation, so that a large fleet may run hotter than a small one. Infinite where the queue only grows.

    `load`: arrivals per second times `mean_seconds`, the mean service time."""
    utilization = load / num_servers
    if utilization >= 1:
        return math.inf
    delayed = utilization ** (math.sqrt(2 * (num_servers + 1)) - 1)  # share of requests that wait at all
    if delayed <= _TAIL:
        return 0.0
    return mean_seconds / (num_servers * (1 - utilization)) * math.log(delayed / _TAIL)


def num_servers_for(load: float, mean_seconds: float, most_seconds: float) -> float | None:
    """The fewest with which nine of ten wait and are served within `most_seconds`; None where no number suffices."""
    if load <= 0:
        return 0.0
    if mean_seconds >= most_seconds:
        return None
    low, high = load, load + 1
    while wait_p90_seconds(high, load, mean_seconds) + mean_seconds > most_seconds:
        low, high = high, high * 2
        if high > _MOST_SERVERS:
            return None
    while high - low > 0.01:
        middle = (low + high) / 2
        if wait_p90_seconds(middle, load, mean_seconds) + mean_seconds > most_seconds:
            low = middle
        else:
            high = middle
    return high
