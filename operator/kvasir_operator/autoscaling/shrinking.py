"""What a decision to have fewer replicas rests on, in words for the status: the need, the window, and the survivors."""

from collections.abc import Sequence

from kvasir_operator.autoscaling.behavior import default_down_window_seconds
from kvasir_operator.autoscaling.demand import Need
from kvasir_operator.autoscaling.latency import Latency
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.autoscaling.situation import Memory, RoleSituation


def why_fewer(
    situation: RoleSituation,
    sample: RoleSample,
    memory: Memory,
    need: Need,
    guarded: Sequence[Latency],
    num_left: int,
) -> str:
    """`memory`: with this decision's recommendation. `guarded`: latencies that survivors must keep."""
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
    seconds = default_down_window_seconds(memory.changes, situation.startup_seconds) if own is None else own
    *former, latest = memory.recommendations
    most = max([latest.replicas, *(each.replicas for each in former if each.at > situation.now - seconds)])
    return f"at most {most} wanted in the last {seconds:.0f} s"


def _of_latency(latency: Latency, num_ready: int, num_left: int) -> str:
    share = latency.with_replicas(num_ready, num_left)
    return f"{latency.reason} p90 of {latency.p90_seconds:.3f} s, {share:.2f} of its SLO with {num_left}"
