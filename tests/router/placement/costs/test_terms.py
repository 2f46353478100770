"""What it takes to add a term: the file of its own, and its name."""

import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.endpoints.address import Role
from kvasir_router.placement import pair_costs
from kvasir_router.placement.costs import TERMS
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes


def constant(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    return [7.0] * len(endpoints)


def loaded_anew(module: ModuleType) -> ModuleType:
    """As the next process would load it."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_term_counts_wherever_costs_are_compared_once_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    request, lone = a_request(), an_endpoint("a")
    without = FinishTime().place(request, [lone], {}, 0.0).cost_seconds
    monkeypatch.setitem(TERMS, "constant", constant)
    assert FinishTime().place(request, [lone], {}, 0.0).cost_seconds == pytest.approx(without + 7)
    assert FinishTime().costs(request, [lone], {}, 0.0)["a"]["constant"] == 7

    decode, prefill = an_endpoint("d", role=Role.DECODE), an_endpoint("p", role=Role.PREFILL)
    arguments = (request, [decode], [prefill], {}, 0.0, TransferTimes(), {})
    before, costs = pair_costs.PairCosts(*arguments), loaded_anew(pair_costs).PairCosts(*arguments)
    for pair, former in (
        (costs.local(decode), before.local(decode)),
        (costs.remote(decode, prefill), before.remote(decode, prefill)),
    ):
        terms = costs.terms(pair)
        assert (terms["constant"], sum(terms.values())) == (7, pytest.approx(pair.seconds))
        assert pair.seconds == pytest.approx(former.seconds + 7)
