"""One sample out of Prometheus's answers."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from kvasir_operator.autoscaling.prometheus import Value
from kvasir_operator.autoscaling.queries import Queries
from kvasir_operator.autoscaling.read import Reading, RoleKey, sample_of
from kvasir_operator.errors import PrometheusError
from kvasir_operator.kube.kinds import ServiceKey

SERVE, DECODE = (RoleKey(ServiceKey("models", "llama"), role) for role in ("serve", "decode"))
BY_POD = {name: {"a": 10.0, "b": 20.0} for name in Queries().by_pod()}
HELD = {
    "num_held": {"r": 2.0, "s": 1.0},
    "held_tokens": {"r": 50.0, "s": 5.0},
    "held_tokens_growth": {"r": 3.0, "s": 2.0},
    "scraped_at": {"r": 15.0, "s": 16.0},
}
RATES = {
    "requests_per_second": 2.0,
    "first_tokens_per_second": 4.0,
    "computed_tokens_per_second": 100.0,
    "output_tokens_per_second": 30.0,
}


def read(role: RoleKey = SERVE, **changes: Any) -> Any:
    return sample_of(role, *(changes.get(*each) for each in (("by_pod", BY_POD), ("of_role", RATES), ("held", HELD))))


def test_pods_and_routers_come_together() -> None:
    sample = read()
    assert [(replica.name, replica.kv_used_tokens) for replica in sample.replicas] == [("a", 10.0), ("b", 20.0)]
    assert (sample.num_held, sample.held_tokens) == (3.0, 55.0)


def test_means_are_of_a_request() -> None:
    sample = read()
    assert (sample.mean_uncached_tokens, sample.mean_output_tokens) == (25.0, 15.0)
    idle = read(of_role={"computed_tokens_per_second": 5.0})
    assert (idle.mean_uncached_tokens, idle.mean_output_tokens) == (0.0, 0.0)


def test_the_sample_is_as_old_as_its_oldest_scrape() -> None:
    assert read().at == 10.0
    assert read(by_pod={**BY_POD, "scraped_at": {"a": 100.0}}).at == 15.0


def test_a_pod_without_a_step_yet_is_there_and_idle() -> None:
    silent: dict[str, dict[str, float]] = {name: {} for name in BY_POD}
    [replica] = read(by_pod={**silent, "kv_capacity_tokens": {"a": 1000.0}}).replicas
    assert (replica.kv_usage, replica.num_in_flight, replica.prefill_tokens_per_second) == (0.0, 0.0, None)


def test_a_pod_that_does_not_say_how_much_it_holds_is_not_there() -> None:
    assert [each.name for each in read(by_pod={**BY_POD, "kv_capacity_tokens": {"a": 0.0, "b": 9.0}}).replicas] == ["b"]


def test_prompts_that_decode_engines_compute_themselves_arrive_there_and_those_that_routers_hold_do_not() -> None:
    """Prompts that came with their KV are not computed there, as tests/runtime/transfer/test_transfer.py shows."""
    decode = read(DECODE)
    assert (decode.uncached_tokens_per_second, decode.computed_tokens_per_second) == (100 + 10 + 20, 100)
    assert decode.mean_uncached_tokens == 25.0


WHOLE = {**BY_POD, "kv_capacity_tokens": {"a": 10.0, "b": 20.0, "new": 30.0}}


def test_what_comes_together_lacks_nothing_and_neither_does_an_engine_before_its_first_step() -> None:
    assert read(by_pod=WHOLE).lacking == ()
    assert read(of_role={}).lacking == ()
    assert read(of_role={name: rate for name, rate in RATES.items() if "computed" not in name}).lacking == ()


@pytest.mark.parametrize(
    "name", ["kv_used_tokens_now", "num_running", "num_waiting", "uncached_tokens", "computed_tokens"]
)
def test_a_series_that_an_engine_lacks_beside_its_others_is_told(name: str) -> None:
    assert read(by_pod={**WHOLE, name: {"a": 10.0}}).lacking == (f"{name} of b",)


@pytest.mark.parametrize("name", ["num_held", "held_tokens", "scraped_at"])
def test_a_series_that_a_router_lacks_beside_its_others_is_told(name: str) -> None:
    sample = read(held={**HELD, name: {"r": 15.0}})
    assert sample.lacking == (f"{name} of s",)


@pytest.mark.parametrize("name", ["requests_per_second", "first_tokens_per_second", "output_tokens_per_second"])
def test_a_rate_that_lacks_beside_others_is_told(name: str) -> None:
    others = {other: rate for other, rate in RATES.items() if other != name}
    assert read(of_role=others).lacking == (f"{name} of the role",)


def test_a_sample_says_which_routers_are_in_it() -> None:
    assert read().routers == {"r", "s"}


def test_without_the_routers_nothing_is_known() -> None:
    with pytest.raises(PrometheusError, match="kvasir_router_queued_requests of models/llama"):
        read(held={name: {} for name in HELD})


def test_what_arrives_is_what_began_and_what_has_come_to_wait_since() -> None:
    assert read().uncached_tokens_per_second == 100 + (10 + 20) + (3 + 2)
    worked_off = read(by_pod={**BY_POD, "uncached_tokens_growth": {"a": -60.0}})
    assert worked_off.uncached_tokens_per_second == 100 - 60 + 5
    assert read(by_pod={**BY_POD, "uncached_tokens_growth": {"a": -600.0}}).uncached_tokens_per_second == 0


def labels(service: str, role: str = "serve", **further: str) -> dict[str, str]:
    return {"namespace": "models", "inference_service": service, "role": role, **further}


class _Answers:
    """A Prometheus of two services with an engine and a router each; llama's rates are over `window`, None: the short
    one. `asked` are the questions."""

    def __init__(self, window: str | None = None, error: PrometheusError | None = None) -> None:
        self._window = {} if window is None else {"window": window}
        self._error = error
        self.asked: list[str] = []

    async def query_all(self, queries: Mapping[Any, str]) -> dict[Any, list[Value]]:
        self.asked += queries.values()
        if self._error is not None:
            raise self._error
        return {name: self._values(query) for name, query in queries.items()}

    def _values(self, query: str) -> list[Value]:
        if "kvasir_router_" in query:
            return [Value({"service": f"models/{name}", "pod": "r"}, number) for name, number in FLEET.items()]
        if "needed_replicas" in query:
            days = labels("llama", service_namespace="models", namespace="kvasir")
            return [Value({**days, "day": day}, 7.0) for day in ("1", "2")]
        if "finish_reason" in query or "quantile" in query:
            return [Value(labels("llama") | self._window, 1.0), Value(labels("qwen"), 5.0)]
        return [Value(labels(name, pod=f"{name}-0"), number) for name, number in FLEET.items()]


FLEET = {"llama": 1.0, "qwen": 5.0}
QWEN = RoleKey(ServiceKey("models", "qwen"), "serve")


def reading(answers: Any) -> Reading:
    return Reading(answers, (), {SERVE: 20.0, QWEN: 30.0, DECODE: 55.0})


@pytest.mark.parametrize(("routers", "num_held"), [(["r"], 1.0), (["other"], None), (None, 1.0)])
def test_only_routers_count_that_exist_or_all_where_nobody_may_say(
    routers: list[str] | None, num_held: float | None
) -> None:
    reads = reading(_Answers()).read(SERVE, routers, ["llama-0"])
    if num_held is None:
        with pytest.raises(PrometheusError, match="does it scrape the routers"):
            asyncio.run(reads)
    else:
        assert asyncio.run(reads)[0].num_held == num_held


@pytest.mark.parametrize(("window", "seconds"), [(None, 60.0), ("2m", 120.0)])
def test_a_sample_says_over_what_window_it_is(window: str | None, seconds: float) -> None:
    sample, _ = asyncio.run(reading(_Answers(window)).read(SERVE, ["r"], ["llama-0"]))
    assert sample.window_seconds == seconds


def test_all_roles_are_read_by_one_question_a_metric() -> None:
    answers = _Answers()

    async def read_each() -> list[Any]:
        read = reading(answers).read
        return await asyncio.gather(*(read(role, ["r"], ["llama-0", "qwen-0"]) for role in (SERVE, QWEN, DECODE)))

    (llama, llama_days), (qwen, qwen_days), (decode, _) = asyncio.run(read_each())
    assert [(each.name, each.num_running) for each in llama.replicas] == [("llama-0", 1.0)]
    assert [(each.name, each.num_running) for each in qwen.replicas] == [("qwen-0", 5.0)]
    assert (llama.requests_per_second, qwen.requests_per_second) == (1.0, 5.0)
    assert (llama_days, qwen_days, decode.replicas) == ((7.0, 7.0), (), ())
    assert len(answers.asked) == len(set(answers.asked)) == 21


def test_an_answer_that_fails_is_every_roles_and_asked_for_once() -> None:
    answers = _Answers(error=PrometheusError("down"))

    async def read_each() -> list[Any]:
        read = reading(answers).read
        return await asyncio.gather(*(read(role, ["r"], []) for role in (SERVE, QWEN)), return_exceptions=True)

    assert [str(each) for each in asyncio.run(read_each())] == ["down", "down"]
    assert len(answers.asked) == len(Queries().by_pod())
