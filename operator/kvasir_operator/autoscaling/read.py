"""One sample of a role, out of what Prometheus answers.

A pod is there once it says how much it holds; what it does not say yet, before its first step, is nothing.
"""

from collections.abc import Collection, Mapping, Sequence

from kvasir_operator.autoscaling.prometheus import Prometheus, Value
from kvasir_operator.autoscaling.queries import LONG_WINDOW_SECONDS, WINDOW_SECONDS, RoleQueries
from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample
from kvasir_operator.errors import PrometheusError

Numbers = Mapping[str, float]


async def read_sample(
    prometheus: Prometheus, queries: RoleQueries, routers: Collection[str] | None, engines: Collection[str]
) -> RoleSample:
    """`engines`, and `routers` where the service has its own: the pods that count. Raises PrometheusError."""
    by_pod = await prometheus.query_all(queries.by_pod())
    of_role = await prometheus.query_all(queries.of_role(engines))
    held = await prometheus.query_all(queries.held(is_behind_gateway=routers is None))
    is_over_long_window = any("window" in value.labels for values in of_role.values() for value in values)
    return sample_of(
        {name: _of_pods(values, engines) for name, values in by_pod.items()},
        {name: values[0].number for name, values in of_role.items() if values},
        {name: _of_pods(values, routers) for name, values in held.items()},
        queries,
        LONG_WINDOW_SECONDS if is_over_long_window else WINDOW_SECONDS,
    )


async def read_former_days(prometheus: Prometheus, queries: RoleQueries, ahead_seconds: float) -> tuple[float, ...]:
    """Of those days that Prometheus remembers. Raises PrometheusError."""
    texts = queries.former_days(ahead_seconds)
    answers = await prometheus.query_all(dict(zip(texts, texts, strict=True)))
    return tuple(values[0].number for values in answers.values() if values)


def sample_of(
    by_pod: Mapping[str, Numbers],
    of_role: Numbers,
    held: Mapping[str, Numbers],
    queries: RoleQueries,
    window_seconds: float = WINDOW_SECONDS,
) -> RoleSample:
    """`window_seconds`: of the longest window in `of_role`.

    Raises PrometheusError where neither engine nor router has a series: then nothing is known, not even idleness.
    """
    scraped = [*by_pod["scraped_at"].values(), *held["scraped_at"].values()]
    if not held["scraped_at"]:
        raise PrometheusError(
            f"Prometheus has no series kvasir_router_queued_requests of {queries.service}: does it scrape the routers?"
        )
    capacities = by_pod["kv_capacity_tokens"]
    finished = of_role.get("requests_per_second", 0.0)
    begun = of_role.get("first_tokens_per_second", 0.0)
    computed = max(0.0, of_role.get("computed_tokens_per_second", 0.0))
    # What began, and what has come to wait since. Of a decode engine prompts came with their KV, or were counted where
    # they were computed.
    growth = sum(by_pod["uncached_tokens_growth"].values()) + sum(held["held_tokens_growth"].values())
    arriving = 0.0 if queries.role == "decode" else max(0.0, computed + growth)
    return RoleSample(
        at=min(scraped),
        replicas=tuple(_load(name, by_pod) for name in sorted(capacities) if capacities[name] > 0),
        num_held=sum(held["num_held"].values()),
        held_tokens=sum(held["held_tokens"].values()),
        requests_per_second=finished,
        uncached_tokens_per_second=arriving,
        computed_tokens_per_second=0.0 if queries.role == "decode" else computed,
        mean_uncached_tokens=computed / begun if begun and queries.role != "decode" else 0.0,
        mean_output_tokens=of_role.get("output_tokens_per_second", 0.0) / finished if finished else 0.0,
        time_to_first_token_p90=of_role.get("time_to_first_token_p90"),
        inter_token_latency_p90=of_role.get("inter_token_latency_p90"),
        window_seconds=window_seconds,
    )


def _of_pods(values: Sequence[Value], names: Collection[str] | None) -> Numbers:
    """By pod; of all of them where `names` is None."""
    found = {value.labels.get("pod", ""): value.number for value in values}
    return {name: number for name, number in found.items() if names is None or name in names}


def _load(name: str, by_pod: Mapping[str, Numbers]) -> ReplicaLoad:
    now = by_pod["kv_used_tokens_now"].get(name, 0.0)
    return ReplicaLoad(
        name,
        kv_used_tokens=by_pod["kv_used_tokens"].get(name, now),
        kv_capacity_tokens=by_pod["kv_capacity_tokens"][name],
        kv_used_tokens_now=now,
        num_running=by_pod["num_running"].get(name, 0.0),
        num_waiting=by_pod["num_waiting"].get(name, 0.0),
        uncached_tokens=by_pod["uncached_tokens"].get(name, 0.0),
        prefill_tokens_per_second=by_pod["prefill_tokens_per_second"].get(name),
    )
