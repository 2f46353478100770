"""The rules side by side, each with the values of its one parameter that are tried; its own default is the last."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks.autoscaling.kvasir import Kvasir
from benchmarks.autoscaling.rivals.aibrix import AibrixKpa
from benchmarks.autoscaling.rivals.dynamo import DynamoLoadPlanner
from benchmarks.autoscaling.rivals.hpa import HpaOnKvUsage, KedaOnQueueLength
from benchmarks.autoscaling.rivals.llm_d import LlmdTokenAware
from benchmarks.autoscaling.rivals.wva import WvaSaturation
from benchmarks.autoscaling.rule import Rule
from benchmarks.autoscaling.simulation import Setting

MOST_REPLICAS = 24
MakeRule = Callable[[float, Setting], Rule]


def _kvasir(share: float, setting: Setting) -> Rule:
    """`share` of the SLO is what its spec says."""
    ttft, itl = share * setting.ttft_seconds, share * setting.itl_seconds
    return Kvasir(ttft, itl, setting.startup_seconds, MOST_REPLICAS)


def _llm_d(seconds: float, setting: Setting) -> Rule:
    return LlmdTokenAware(seconds, setting.model.prefill_tokens_per_second, MOST_REPLICAS)


def _dynamo(share: float, setting: Setting) -> Rule:
    rate = setting.model.prefill_tokens_per_second
    return DynamoLoadPlanner(share, setting.ttft_seconds, setting.itl_seconds, rate, MOST_REPLICAS)


LINEUP: Mapping[str, tuple[MakeRule, tuple[float, ...]]] = MappingProxyType(
    {
        "kvasir": (_kvasir, (0.5, 0.75, 1.0)),
        "hpa-kv-usage": (lambda target, _: HpaOnKvUsage(target, MOST_REPLICAS), (0.15, 0.25, 0.4, 0.6, 0.8)),
        "keda-queue": (lambda queue, _: KedaOnQueueLength(queue, MOST_REPLICAS), (0.25, 0.5, 1, 2, 5)),
        "aibrix-kpa": (lambda target, _: AibrixKpa(target, MOST_REPLICAS), (0.15, 0.25, 0.35, 0.5)),
        "wva-saturation": (lambda kv, _: WvaSaturation(kv, MOST_REPLICAS), (0.3, 0.4, 0.6, 0.8)),
        "llm-d-tokens": (_llm_d, (0.25, 0.5, 1.0, 1.5)),
        "dynamo-load": (_dynamo, (0.25, 0.5, 0.75, 1.0)),
    }
)
