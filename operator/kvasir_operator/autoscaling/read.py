"""One sample of a role, out of what Prometheus answers.

A pod is there once it says how much it holds. Before its first step it says nothing else; after that what comes of a
pod together is there together, or something is wrong on the way here.
"""

from collections.abc import Collection, Mapping, Sequence

from kvasir_operator.autoscaling.prometheus import Prometheus, Value
from kvasir_operator.autoscaling.queries import LONG_WINDOW_SECONDS, WINDOW_SECONDS, RoleQueries
from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample
from kvasir_operator.errors import PrometheusError

Numbers = Mapping[str, float]
_OF_STEPS = ("kv_used_tokens_now", "num_running", "num_waiting", "uncached_tokens", "computed_tokens")
"""That an engine has from its first step on."""
_OF_REQUESTS = ("requests_per_second", "first_tokens_per_second", "output_tokens_per_second")
"""Rates that engines have from their start on."""
_OF_ROUTERS = ("num_held", "held_tokens", "scraped_at")


async def read_sample(
    prometheus: Prometheus,
    queries: RoleQueries,
    routers: Collection[str] | None,
    engines: Collection[str],
    *,
    is_behind_gateway: bool = False,
) -> RoleSample:
    """`engines` and `routers`: the pods that count; None: all that hold something for the service, where nobody may say
    which pods are the gateway's. Raises PrometheusError."""
    by_pod = await prometheus.query_all(queries.by_pod())
    of_role = await prometheus.query_all(queries.of_role(engines))
    held = await prometheus.query_all(queries.held(is_behind_gateway))
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
    # A decode engine finds the KV that it is handed in its cache, and computes what nobody has prefilled for it.
    computed = max(0.0, of_role.get("computed_tokens_per_second", 0.0))
    growth = sum(by_pod["uncached_tokens_growth"].values())
    if queries.role != "decode":  # what is held will be prefilled elsewhere
        growth += sum(held["held_tokens_growth"].values())
    return RoleSample(
        at=min(scraped),
        replicas=tuple(_load(name, by_pod) for name in sorted(capacities) if capacities[name] > 0),
        num_held=sum(held["num_held"].values()),
        held_tokens=sum(held["held_tokens"].values()),
        requests_per_second=finished,
        uncached_tokens_per_second=max(0.0, computed + growth),
        computed_tokens_per_second=computed,
        mean_uncached_tokens=computed / begun if begun else 0.0,
        mean_output_tokens=of_role.get("output_tokens_per_second", 0.0) / finished if finished else 0.0,
        time_to_first_token_p90=of_role.get("time_to_first_token_p90"),
        inter_token_latency_p90=of_role.get("inter_token_latency_p90"),
        window_seconds=window_seconds,
        routers=frozenset(held["scraped_at"]),
        lacking=(
            *_lacking(by_pod, _OF_STEPS),
            *_lacking(held, _OF_ROUTERS),
            *_lacking({name: {"the role": 0.0} if name in of_role else {} for name in _OF_REQUESTS}, _OF_REQUESTS),
        ),
    )


def _of_pods(values: Sequence[Value], names: Collection[str] | None) -> Numbers:
    """By pod; of all of them where `names` is None."""
    found = {value.labels.get("pod", ""): value.number for value in values}
    return {name: number for name, number in found.items() if names is None or name in names}


def _lacking(found: Mapping[str, Numbers], together: Sequence[str]) -> list[str]:
    """Of `together`, what is missing where some of it is there."""
    pods = {pod for name in together for pod in found[name]}
    return [f"{name} of {pod}" for pod in sorted(pods) for name in together if pod not in found[name]]


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
