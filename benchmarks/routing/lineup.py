"""The rules that a run compares, by name."""

from collections.abc import Callable

from benchmarks.routing.blocks import LateBlockMap
from benchmarks.routing.kvasir import ApproximateKvasir, FetchingKvasir, HeardKvasir, introduce
from benchmarks.routing.rivals.aibrix import Aibrix
from benchmarks.routing.rivals.dynamo import Active, Dynamo
from benchmarks.routing.rivals.llm_d import LlmD
from benchmarks.routing.rivals.preble import Preble
from benchmarks.routing.rivals.production_stack import ProductionStack
from benchmarks.routing.rivals.round_robin import RoundRobin
from benchmarks.routing.rivals.sglang_cache_aware import SglangCacheAware
from benchmarks.routing.rules import Rule, World
from benchmarks.routing.simulation import MakeRules

from kvasir_router.placement.finish_time import FinishTime


def _each(make: Callable[[World], Rule]) -> MakeRules:
    """Every router for itself."""
    return lambda world, num_routers: [make(world) for _ in range(num_routers)]


def _dynamo(*, is_product: bool) -> MakeRules:
    def make(world: World, num_routers: int) -> list[Rule]:
        heard, active = _heard(world), Active(len(world.engines))
        return [Dynamo(world, heard, active, is_product=is_product) for _ in range(num_routers)]

    return make


def _heard_kvasir(world: World, num_routers: int) -> list[Rule]:
    heard = _heard(world)
    return [*introduce(world, [HeardKvasir(world, FinishTime(), heard) for _ in range(num_routers)])]


def _fetching_kvasir(world: World, num_routers: int) -> list[Rule]:
    heard = _heard(world)
    return [*introduce(world, [FetchingKvasir(world, FinishTime(), heard) for _ in range(num_routers)])]


def _approximate_kvasir(world: World, num_routers: int) -> list[Rule]:
    return [*introduce(world, [ApproximateKvasir(world, FinishTime()) for _ in range(num_routers)])]


def _heard(world: World) -> LateBlockMap:
    return LateBlockMap(len(world.engines), world.updates, world.late_seconds)


LINEUP: dict[str, MakeRules] = {
    "kvasir, KV events": _heard_kvasir,
    "kvasir, KV fetched": _fetching_kvasir,
    "kvasir, approximate": _approximate_kvasir,
    "round robin": _each(RoundRobin),
    "SGLang cache_aware": _each(SglangCacheAware),
    "llm-d default": _each(LlmD),
    "Dynamo linear": _dynamo(is_product=False),
    "Dynamo lmetric": _dynamo(is_product=True),
    "AIBrix prefix-cache": _each(Aibrix),
    "Preble E2": _each(Preble),
    "production-stack": _each(ProductionStack),
}
