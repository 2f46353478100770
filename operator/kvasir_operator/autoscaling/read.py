"""Samples of roles, out of what Prometheus answers about all of them at once.

A pod is there once it says how much it holds. Before its first step it says nothing else; after that what comes of a
pod together is there together, or something is wrong on the way here.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from kvasir_operator.autoscaling.prometheus import Prometheus, Value
from kvasir_operator.autoscaling.queries import LONG_WINDOW_SECONDS, WINDOW_SECONDS, Queries
from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample
from kvasir_operator.errors import PrometheusError
from kvasir_operator.kube.kinds import ServiceKey

Numbers = Mapping[str, float]
Name = TypeVar("Name")
Key = TypeVar("Key")
_OF_STEPS = ("kv_used_tokens_now", "num_running", "num_waiting", "uncached_tokens", "computed_tokens")
"""That an engine has from its first step on."""
_OF_REQUESTS = ("requests_per_second", "first_tokens_per_second", "output_tokens_per_second")
"""Rates that engines have from their start on."""
_OF_ROUTERS = ("num_held", "held_tokens", "scraped_at")


@dataclass(frozen=True)
class RoleKey:
    service: ServiceKey
    name: str


@dataclass(frozen=True)
class _Answers:
    """By the names of `Queries`, then by role, `held` by service; days by how far ahead they look."""

    by_pod: Mapping[str, Mapping[RoleKey, Sequence[Value]]]
    of_role: Mapping[str, Mapping[RoleKey, Sequence[Value]]]
    held: Mapping[str, Mapping[str, Sequence[Value]]]
    days: Mapping[float, Mapping[RoleKey, Sequence[Value]]]


class Reading:
    """What Prometheus says at one moment: asked for the first role that is read, about all of them."""

    def __init__(self, prometheus: Prometheus, namespaces: Collection[str], ahead: Mapping[RoleKey, float]) -> None:
        """`namespaces`: empty for all. `ahead`: seconds by which each role looks ahead into former days."""
        self._prometheus, self._queries = prometheus, Queries(namespaces)
        # In whole minutes, so that few questions do for all of them.
        self._ahead = {role: 60.0 * ceil(seconds / 60) for role, seconds in ahead.items()}
        self._asking = asyncio.Lock()
        self._answers: _Answers | PrometheusError | None = None

    async def read(
        self, role: RoleKey, routers: Collection[str] | None, engines: Collection[str]
    ) -> tuple[RoleSample, tuple[float, ...]]:
        """The sample, and what was needed on those former days that Prometheus remembers. Raises PrometheusError.

        `engines` and `routers`: the pods that count; None: all that hold something for the service, where nobody may
        say which pods are the gateway's.
        """
        answers = await self._answered()
        of_role = {name: by_role[role][0] for name, by_role in answers.of_role.items() if role in by_role}
        is_over_long_window = any("window" in value.labels for value in of_role.values())
        sample = sample_of(
            role,
            {name: _of_pods(by_role.get(role, ()), engines) for name, by_role in answers.by_pod.items()},
            {name: value.number for name, value in of_role.items()},
            {name: _of_pods(of.get(str(role.service), ()), routers) for name, of in answers.held.items()},
            LONG_WINDOW_SECONDS if is_over_long_window else WINDOW_SECONDS,
        )
        return sample, tuple(value.number for value in answers.days[self._ahead[role]].get(role, ()))

    async def _answered(self) -> _Answers:
        async with self._asking:
            if self._answers is None:
                try:
                    self._answers = await self._ask()
                except PrometheusError as error:
                    self._answers = error
        if isinstance(self._answers, PrometheusError):
            raise self._answers
        return self._answers

    async def _ask(self) -> _Answers:
        ask, queries = self._prometheus.query_all, self._queries
        days = {ahead: queries.former_days(ahead) for ahead in set(self._ahead.values())}
        return _Answers(
            _grouped(await ask(queries.by_pod()), _role_of),
            _grouped(await ask(queries.of_role()), _role_of),
            _grouped(await ask(queries.held()), lambda value: value.labels.get("service", "")),
            _grouped(await ask(days), _role_of),
        )


def _grouped(
    answers: Mapping[Name, Sequence[Value]], key_of: Callable[[Value], Key]
) -> dict[Name, dict[Key, list[Value]]]:
    found: dict[Name, dict[Key, list[Value]]] = {name: defaultdict(list) for name in answers}
    for name, values in answers.items():
        for value in values:
            found[name][key_of(value)].append(value)
    return found


def _role_of(value: Value) -> RoleKey:
    """Engines' series are in their service's namespace, and those about services name it."""
    namespace, *rest = (value.labels.get(name, "") for name in ("namespace", "inference_service", "role"))
    return RoleKey(ServiceKey(value.labels.get("service_namespace", namespace), rest[0]), rest[1])


def sample_of(
    role: RoleKey,
    by_pod: Mapping[str, Numbers],
    of_role: Numbers,
    held: Mapping[str, Numbers],
    window_seconds: float = WINDOW_SECONDS,
) -> RoleSample:
    """`window_seconds`: of the longest window in `of_role`.

    Raises PrometheusError where neither engine nor router has a series: then nothing is known, not even idleness.
    """
    scraped = [*by_pod["scraped_at"].values(), *held["scraped_at"].values()]
    if not held["scraped_at"]:
        raise PrometheusError(
            f"Prometheus has no series kvasir_router_queued_requests of {role.service}: does it scrape the routers?"
        )
    capacities = by_pod["kv_capacity_tokens"]
    finished = of_role.get("requests_per_second", 0.0)
    begun = of_role.get("first_tokens_per_second", 0.0)
    # A decode engine finds the KV that it is handed in its cache, and computes what nobody has prefilled for it.
    computed = max(0.0, of_role.get("computed_tokens_per_second", 0.0))
    growth = sum(by_pod["uncached_tokens_growth"].values())
    if role.name != "decode":  # what is held will be prefilled elsewhere
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
