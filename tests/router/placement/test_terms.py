"""What it takes to add a term: the file of its own, and its name."""

from collections.abc import Mapping, Sequence

import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.endpoints.address import Role
from kvasir_router.placement.costs import TERMS
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.pair_costs import PairCosts, Sides
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.transfer_times import TransferTimes


def constant(
    request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Mapping[str, int], now: float
) -> list[float]:
    return [7.0] * len(endpoints)


def test_a_term_counts_wherever_costs_are_compared_once_it_is_named() -> None:
    request, lone, terms = a_request(), an_endpoint("a"), TERMS | {"constant": constant}
    without, policy = FinishTime().place(request, [lone], {}, 0.0).cost_seconds, FinishTime(terms)
    assert policy.place(request, [lone], {}, 0.0).cost_seconds == pytest.approx(without + 7)
    assert policy.costs(request, [lone], {}, 0.0)["a"]["constant"] == 7

    decode, prefill = an_endpoint("d", role=Role.DECODE), an_endpoint("p", role=Role.PREFILL)
    arguments = (request, [decode], [prefill], {}, 0.0, TransferTimes(), {})
    before, costs = PairCosts(*arguments), PairCosts(*arguments, Sides.of(terms))
    for pair, former in (
        (costs.local(decode), before.local(decode)),
        (costs.remote(decode, prefill), before.remote(decode, prefill)),
    ):
        terms = costs.terms(pair)
        assert (terms["constant"], sum(terms.values())) == (7, pytest.approx(pair.seconds))
        assert pair.seconds == pytest.approx(former.seconds + 7)
