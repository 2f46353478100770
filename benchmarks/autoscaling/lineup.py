"""The rules side by side, each with the values of its one parameter that are tried; its own default is the last.

Others' count each role by the same rule. Those that can go to zero do so after as long as kvasir does, where they are
let: KEDA's objects by cooldown and activation, the WVA by its own loop.
"""

from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType

from benchmarks.autoscaling.kvasir import Kvasir, spec_of
from benchmarks.autoscaling.rivals.aibrix import AibrixKpa
from benchmarks.autoscaling.rivals.dynamo import DynamoLoadPlanner
from benchmarks.autoscaling.rivals.hpa import HpaOnKvUsage, KedaOnQueueLength
from benchmarks.autoscaling.rivals.llm_d import LlmdTokenAware
from benchmarks.autoscaling.rivals.wva import WvaSaturation
from benchmarks.autoscaling.rule import EachRole, Rule, Rules, ToZero
from benchmarks.autoscaling.simulation import DECODE, PREFILL, Setting

MOST_REPLICAS = 24
IDLE_SECONDS = 300.0
MakeRule = Callable[[float, Setting, str], Rule]
MakeRules = Callable[[float, Setting], Rules]


def _kvasir(share: float, setting: Setting) -> Rules:
    """`share` of the SLO is what its spec says."""
    ttft, itl = share * setting.ttft_seconds, share * setting.itl_seconds
    spec = spec_of(ttft, itl, MOST_REPLICAS, can_sleep=setting.can_sleep)
    return Kvasir(setting.roles, spec, setting.startup_seconds)


def _llm_d(seconds: float, setting: Setting, _: str) -> Rule:
    return LlmdTokenAware(seconds, setting.model.prefill_tokens_per_second, MOST_REPLICAS)


def _dynamo(share: float, setting: Setting, role: str) -> Rule:
    """Each role answers for its own latency."""
    ttft = inf if role == DECODE else share * setting.ttft_seconds
    itl = inf if role == PREFILL else share * setting.itl_seconds
    return DynamoLoadPlanner(ttft, itl, setting.model, MOST_REPLICAS)


def _each(make: MakeRule, asleep_seconds: float | None = inf) -> MakeRules:
    """`asleep_seconds`: how often it looks at zero, None as often as else; infinite where it never goes there."""

    def make_all(threshold: float, setting: Setting) -> Rules:
        rules = {role: make(threshold, setting, role) for role in setting.roles}
        if setting.can_sleep and asleep_seconds != inf:
            rules = {role: ToZero(rule, IDLE_SECONDS, asleep_seconds) for role, rule in rules.items()}
        return EachRole(rules)

    return make_all


LINEUP: Mapping[str, tuple[MakeRules, tuple[float, ...]]] = MappingProxyType(
    {
        "kvasir": (_kvasir, (0.5, 0.75, 1.0)),
        "hpa-kv-usage": (_each(lambda target, *_: HpaOnKvUsage(target, MOST_REPLICAS)), (0.15, 0.25, 0.4, 0.6, 0.8)),
        "keda-queue": (_each(lambda queue, *_: KedaOnQueueLength(queue, MOST_REPLICAS), None), (0.25, 0.5, 1, 2, 5)),
        "aibrix-kpa": (_each(lambda target, *_: AibrixKpa(target, MOST_REPLICAS)), (0.15, 0.25, 0.35, 0.5)),
        "wva-saturation": (
            _each(lambda kv, *_: WvaSaturation(kv, MOST_REPLICAS), 0.1),
            (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.8),
        ),
        "llm-d-tokens": (_each(_llm_d, None), (0.25, 0.5, 1.0, 1.5)),
        "dynamo-load": (_each(_dynamo), (0.25, 0.5, 0.75, 1.0)),
    }
)
