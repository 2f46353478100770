"""How many replicas one role is to have: hold, wake, go to zero, or follow the need at the pace that the spec allows.

Pure: what was measured, what is wanted now and what is remembered go in; a verdict and the next memory come out.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from kvasir_operator.api.quantity import Duration
from kvasir_operator.autoscaling.behavior import (
    GAP_SECONDS,
    MOST_SECONDS,
    TOLERANCE,
    Change,
    Recommendation,
    Returns,
    limited,
    returns_of,
    rounded,
    stabilized,
)
from kvasir_operator.autoscaling.capacity import capacity_of, is_saturated, with_throughput
from kvasir_operator.autoscaling.demand import BUSIEST_KV_USAGE, Demand, Need, ScalingReason, demand_of
from kvasir_operator.autoscaling.drain import backlog_growth, is_passing, is_waited_for, queued_tokens, with_backlog
from kvasir_operator.autoscaling.forecast import TREND_SECONDS, PastNeed, forecast, noted
from kvasir_operator.autoscaling.latency import Latency, Trial, attainable, judged, latency_need, standing_trial
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.autoscaling.situation import HoldReason, Memory, RoleSituation, Verdict

STALE_SECONDS = 90.0
"""Three scrapes of the usual length."""
_LATENCIES = (ScalingReason.TIME_TO_FIRST_TOKEN, ScalingReason.INTER_TOKEN_LATENCY)


def decide(situation: RoleSituation, memory: Memory, is_service_idle: bool = False) -> tuple[Verdict, Memory]:
    """`is_service_idle`: no role of the service has had work for as long as it takes to go to zero."""
    if (held := why_held(situation)) is not None:
        reason, text = held
        return _within_bounds(situation, Verdict(situation.current, None, text, held=reason)), memory
    assert situation.sample is not None
    sample = situation.sample.only(situation.ready)
    memory = _with_sample(memory, situation, sample)
    if situation.current == 0:
        verdict = _wake(situation, sample, memory)
        memory = replace(memory, history=noted(memory.history, situation.now, 0.0, situation.startup_seconds))
    elif is_service_idle and situation.spec.min_replicas == 0:
        verdict = Verdict(0, ScalingReason.IDLE, f"no request for {situation.spec.scale_to_zero_after.text}", 0.0)
    else:
        return _follow(situation, sample, memory)
    return verdict, _with_change(memory, situation, verdict)


def why_held(situation: RoleSituation) -> tuple[HoldReason, str] | None:
    """None where something can be: what is measured is there, fresh, and of all replicas that should have series."""
    sample = situation.sample
    if sample is None:
        reason = HoldReason.NOTHING_MEASURED if situation.is_beginning else HoldReason.METRICS_UNAVAILABLE
        return reason, situation.trouble
    age = (situation.now if sample.asked_at is None else sample.asked_at) - sample.at
    if age > STALE_SECONDS:
        return HoldReason.METRICS_STALE, f"the newest sample is {age:.0f} s old, expected at most {STALE_SECONDS:g} s"
    missing = _missing(situation, sample)
    if missing and situation.current:  # at zero those that are warm still are on their way out
        reason = HoldReason.NOTHING_MEASURED if situation.is_beginning else HoldReason.METRICS_MISSING
        return reason, f"Prometheus has no series of {', '.join(missing)}"
    return None


def _missing(situation: RoleSituation, sample: RoleSample) -> list[str]:
    engines = situation.warm - {replica.name for replica in sample.replicas}
    return [*sorted(engines), *sorted(situation.warm_routers - sample.routers), *sample.lacking]


def _within_bounds(situation: RoleSituation, verdict: Verdict) -> Verdict:
    """The spec's bounds hold even while nothing is known; what is at zero stays there for want of a reason to wake."""
    least = max(situation.spec.min_replicas, min(1, situation.current))
    replicas = min(max(verdict.replicas, least), situation.spec.max_replicas)
    if replicas == verdict.replicas:
        return verdict
    message = _with_bounds(situation, verdict.message)
    return replace(verdict, replicas=replicas, reason=ScalingReason.BOUNDS, message=message)


def _with_bounds(situation: RoleSituation, message: str) -> str:
    return f"minReplicas {situation.spec.min_replicas}, maxReplicas {situation.spec.max_replicas}; {message}"


def _wake(situation: RoleSituation, sample: RoleSample, memory: Memory) -> Verdict:
    if not sample.num_held:
        return _within_bounds(situation, Verdict(0, None, "no request is held", 0.0))
    needed = 1.0
    if memory.capacity is not None:
        needed = max(1.0, _demand(situation, sample, memory, growth=0.0).need.replicas)
    text = f"{sample.num_held:.0f} requests of {sample.held_tokens:.0f} prompt tokens wait for the first replica"
    least = max(1, situation.spec.min_replicas)
    replicas = min(max(ceil(needed), least), situation.spec.max_replicas)
    return Verdict(replicas, ScalingReason.HELD_REQUESTS, text, needed)


def _follow(situation: RoleSituation, sample: RoleSample, memory: Memory) -> tuple[Verdict, Memory]:
    if memory.capacity is None:
        text = "no replica has told its capacity yet"
        return _within_bounds(
            situation, Verdict(situation.current, None, text, held=HoldReason.NOTHING_MEASURED)
        ), memory
    latencies, now = _latencies(situation, sample, memory), situation.now
    memory = replace(memory, queued_at=now if queued_tokens(sample, _ttft_seconds(situation)) else memory.queued_at)
    passing = ScalingReason.TIME_TO_FIRST_TOKEN if _is_passing(situation, sample, memory) else None
    telling = [each for each in latencies if each.reason is not passing] if situation.is_settled else []
    if situation.is_settled and (memory.trial is None or memory.trial.reason is not passing):
        trial = judged(memory.trial, telling, now)
        memory = replace(memory, trial=standing_trial(trial, attainable(trial, telling), now))
    guarded = attainable(memory.trial, latencies)
    demand = _demand(situation, sample, memory, backlog_growth(memory.backlogs))
    need, memory = _need(situation, demand, memory, [each for each in guarded if each in telling])
    wanted, memory = _paced(situation, need, memory)
    wanted = _least_that_hold(situation, sample, guarded, wanted)
    if wanted < situation.current:
        need = replace(need, message=_why_fewer(situation, sample, memory, need, guarded, wanted))
    verdict = _verdict(situation, wanted, need, demand.need.replicas)
    if situation.is_rolling and verdict.replicas < situation.current:
        text = f"a rollout is in progress, after which fewer may do: {verdict.message}"
        held = Verdict(situation.current, None, text, verdict.needed, held=HoldReason.ROLLOUT)
        return _within_bounds(situation, held), memory
    if verdict.replicas > situation.current and need.reason in _LATENCIES:
        ratio = next(each.ratio for each in guarded if each.reason is need.reason)
        memory = replace(memory, trial=Trial(need.reason, ratio, situation.now))
    return verdict, _with_change(memory, situation, verdict)


def _demand(situation: RoleSituation, sample: RoleSample, memory: Memory, growth: float) -> Demand:
    assert memory.capacity is not None
    target, ttft = situation.spec.target_kv_cache_usage, _ttft_seconds(situation)
    starting, slots = _starting(situation, memory), situation.slots
    return demand_of(sample, memory.capacity, target, ttft, situation.startup_seconds, starting, growth, slots)


def _starting(situation: RoleSituation, memory: Memory) -> list[float]:
    """Seconds until each of the replicas on their way should serve; the latest that were asked for are those."""
    num, ahead_seconds = max(0, situation.current - len(situation.ready)), situation.startup_seconds
    asked = [change.at for change in reversed(memory.changes) for _ in range(change.delta)][:num]
    asked += [situation.now] * (num - len(asked))
    return [max(0.0, at + ahead_seconds - situation.now) for at in asked]


def _ttft_seconds(situation: RoleSituation) -> float | None:
    """The SLO of the time to the first token, where the role answers for it."""
    return None if situation.role == "decode" else _slo_seconds(situation, ScalingReason.TIME_TO_FIRST_TOKEN)


def _is_passing(situation: RoleSituation, sample: RoleSample, memory: Memory) -> bool:
    ttft, ahead_seconds = _ttft_seconds(situation), situation.startup_seconds
    return is_passing(sample, ttft, memory.queued_at, situation.now, ahead_seconds)


def _need(situation: RoleSituation, demand: Demand, memory: Memory, judged: list[Latency]) -> tuple[Need, Memory]:
    """The largest of demand, of latencies and of the forecast. `judged`: latencies that tell of all replicas wanted."""
    now, ahead_seconds = situation.now, situation.startup_seconds
    past = (*memory.needs, PastNeed(now, demand.lasting_replicas))
    history = noted(memory.history, now, demand.lasting_replicas, ahead_seconds)
    ahead = forecast(past, history, now, ahead_seconds, situation.former_days)
    text = f"{ahead:.2f} replicas needed in {ahead_seconds:.0f} s, {demand.need.replicas:.2f} now"
    needs = [demand.need, Need(ahead, ScalingReason.FORECAST, text)]
    guard = latency_need(judged, situation.current)
    if guard is not None:
        needs.append(guard)
    kept = tuple(each for each in past if each.at > now - TREND_SECONDS)
    return max(needs, key=lambda need: need.replicas), replace(memory, needs=kept, history=history)


def _paced(situation: RoleSituation, need: Need, memory: Memory) -> tuple[int, Memory]:
    spec, now, current = situation.spec, situation.now, situation.current
    former = memory.recommendations
    if not former or now - former[-1].at > max(GAP_SECONDS, 2 * situation.turn_seconds):
        former = (Recommendation(now, current),)
    # What keeps prompts within the SLO leaves nothing to spare: a tenth more makes them wait beyond it.
    is_exact = need.reason is ScalingReason.PREFILL_DEMAND and _ttft_seconds(situation) is not None
    whole = rounded(need.replicas, former[-1].replicas, 0.0 if is_exact else TOLERANCE)
    wanted = min(max(whole, spec.min_replicas, 1), spec.max_replicas)
    kept = [each for each in former if each.at > now - MOST_SECONDS]
    recommendations = (*kept, Recommendation(now, wanted))
    down_seconds = _returns(situation, memory).window_seconds
    stable = stabilized(recommendations, current, spec.behavior, now, down_seconds)
    paced = limited(stable, current, memory.changes, spec.behavior, now)
    return paced, replace(memory, recommendations=recommendations)


def _returns(situation: RoleSituation, memory: Memory) -> Returns:
    """A known period says when load comes back, so that nothing is kept for want of knowing."""
    is_known = memory.history.period is not None
    return returns_of(memory.changes, 0.0 if is_known else situation.startup_seconds, situation.current)


def _least_that_hold(situation: RoleSituation, sample: RoleSample, guarded: list[Latency], wanted: int) -> int:
    """Of a role that shrinks, the fewest from `wanted` on that hold what all of them hold now."""
    current = situation.current
    return next(
        (each for each in range(wanted, current) if _hold(each, situation, sample, guarded)), max(wanted, current)
    )


def _hold(num_left: int, situation: RoleSituation, sample: RoleSample, guarded: list[Latency]) -> bool:
    """Whether `num_left` survivors hold the tokens and requests in flight, the busiest one's part and the SLO."""
    num_ready = len(sample.replicas)
    if not num_ready:
        return True
    if sample.busiest_kv_usage * num_ready / num_left > BUSIEST_KV_USAGE:
        return False
    if situation.slots is not None and sample.most_running * num_ready / num_left > situation.slots:
        return False
    return all(each.with_replicas(num_ready, num_left) <= 1 for each in guarded)


def _verdict(situation: RoleSituation, wanted: int, need: Need, demanded: float) -> Verdict:
    if wanted == situation.current:
        return _within_bounds(situation, Verdict(wanted, None, need.message, demanded))
    least, most, is_growing = situation.spec.min_replicas, situation.spec.max_replicas, wanted > situation.current
    is_by_bounds = (wanted == least > ceil(need.replicas)) if is_growing else (wanted == most < need.replicas)
    if is_by_bounds:
        return Verdict(wanted, ScalingReason.BOUNDS, _with_bounds(situation, need.message), demanded)
    reason = need.reason if is_growing else ScalingReason.LOW_DEMAND
    return _within_bounds(situation, Verdict(wanted, reason, need.message, demanded))


def _latencies(situation: RoleSituation, sample: RoleSample, memory: Memory) -> list[Latency]:
    """Those that the role answers for and that were measured."""
    rate = None if memory.capacity is None else memory.capacity.prefill_tokens_per_second
    measured = {
        ScalingReason.TIME_TO_FIRST_TOKEN: None if situation.role == "decode" else sample.time_to_first_token_p90,
        ScalingReason.INTER_TOKEN_LATENCY: None if situation.role == "prefill" else sample.inter_token_latency_p90,
    }
    own_seconds = sample.mean_uncached_tokens / rate if rate else 0.0
    floors: dict[ScalingReason, float] = {ScalingReason.TIME_TO_FIRST_TOKEN: own_seconds}
    if sample.time_to_first_token_p90 and not is_waited_for(memory.backlogs, sample, own_seconds):
        floors[ScalingReason.TIME_TO_FIRST_TOKEN] = sample.time_to_first_token_p90  # long prompts, no queue
    return [
        Latency(reason, p90, slo, floors.get(reason, 0.0))
        for reason, p90 in measured.items()
        if p90 is not None and (slo := _slo_seconds(situation, reason)) is not None
    ]


def _slo_seconds(situation: RoleSituation, reason: ScalingReason) -> float | None:
    slo = situation.spec.slo
    if slo is None:
        return None
    duration: Duration | None = {
        ScalingReason.TIME_TO_FIRST_TOKEN: slo.time_to_first_token,
        ScalingReason.INTER_TOKEN_LATENCY: slo.inter_token_latency,
    }[reason]
    return None if duration is None else duration.seconds


def _with_sample(memory: Memory, situation: RoleSituation, sample: RoleSample) -> Memory:
    memory = replace(memory, backlogs=with_backlog(memory.backlogs, sample, situation.ready))
    warm = [replica for replica in sample.replicas if replica.name in situation.warm]
    capacity = capacity_of(warm or sample.replicas, memory.capacity)
    if capacity is None or len(warm) < len(sample.replicas):
        return replace(memory, capacity=capacity, saturated_since=None)
    now, since = situation.now, memory.saturated_since
    since = (now if since is None else since) if is_saturated(sample, capacity) else None
    was_saturated = since is not None and now - since >= sample.window_seconds
    return replace(memory, capacity=with_throughput(capacity, sample, was_saturated), saturated_since=since)


def _with_change(memory: Memory, situation: RoleSituation, verdict: Verdict) -> Memory:
    kept = tuple(each for each in memory.changes if each.at > situation.now - MOST_SECONDS)
    delta = verdict.replicas - situation.current
    ahead_seconds = situation.startup_seconds if verdict.reason is ScalingReason.FORECAST else 0.0
    is_tried = verdict.reason is ScalingReason.INTER_TOKEN_LATENCY  # the other one is waited for by a queue
    change = Change(situation.now, delta, ahead_seconds, is_tried)
    return replace(memory, changes=(*kept, change) if delta else kept)


def _why_fewer(
    situation: RoleSituation,
    sample: RoleSample,
    memory: Memory,
    need: Need,
    guarded: Sequence[Latency],
    num_left: int,
) -> str:
    """In words for the status: the need, the window, and what the survivors hold.

    `memory`: with this decision's recommendation. `guarded`: latencies that survivors must keep."""
    texts = [f"{need.message}: {need.replicas:.2f} replicas", _of_window(situation, memory)]
    num_ready = len(sample.replicas)
    if num_ready:
        usage = sample.busiest_kv_usage
        then = f"{usage * num_ready / num_left:.2f} with {num_left}"
        texts.append(f"the busiest of {num_ready} uses {usage:.2f} of its KV cache, {then}")
        if situation.slots is not None:
            texts.append(f"one runs {sample.most_running:.0f} of {situation.slots} requests at once")
        texts += [_of_latency(each, num_ready, num_left) for each in guarded]
    return "; ".join(texts)


def _of_window(situation: RoleSituation, memory: Memory) -> str:
    own = situation.spec.behavior.scale_down.stabilization_window_seconds
    seconds = _returns(situation, memory).window_seconds if own is None else own
    *former, latest = memory.recommendations
    most = max([latest.replicas, *(each.replicas for each in former if each.at > situation.now - seconds)])
    return f"at most {most} wanted in the last {seconds:.0f} s"


def _of_latency(latency: Latency, num_ready: int, num_left: int) -> str:
    share = latency.with_replicas(num_ready, num_left)
    return f"{latency.reason} p90 of {latency.p90_seconds:.3f} s, {share:.2f} of its SLO with {num_left}"
