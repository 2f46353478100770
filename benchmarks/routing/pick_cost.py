"""What one pick costs the router's event loop: matching a prompt, comparing costs, counting the dispatch.

    python -m benchmarks.routing.pick_cost

prints microseconds of thread time, the quietest of many rounds: 8 and 64 endpoints under load, prompts of 12k tokens
(192 blocks) of which every endpoint holds the first blocks and some hold more, as conversations on one system prompt
leave them. `place` is of prompts of which each continues what nobody has asked for before; `again`, of a few in turn.
"""

import time
from collections.abc import Callable
from random import Random

from kvasir_router.dialects.text_prompts import Completions
from kvasir_router.endpoints.address import Address
from kvasir_router.picker import Picker
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.placement import Placement
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex, BlockHashes
from kvasir_router.request import InferenceRequest
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint, EndpointState, Registry

_NUM_ROUNDS = 200
_PICKS_A_ROUND = 20
_NUM_BLOCKS, _NUM_SHARED_BLOCKS = 192, 16
_BLOCK_TOKENS = 64


class _Fleet:
    def __init__(self, num_endpoints: int) -> None:
        self._source = Random(num_endpoints)
        prefill = FleetPrefill()
        self.registry = Registry(lambda: EndpointLoad(512, prefill.new_member()), lambda: None, own_models={"m"})
        urls = {Address(f"http://10.0.0.{number}:8000") for number in range(num_endpoints)}
        self.registry.set_addresses(urls, EndpointState.READY)
        self.index = ApproximatePrefixIndex(32768, 1200.0, _BLOCK_TOKENS, 4.0)
        self.ledger, self.picker = Ledger(lambda: None), Picker(FinishTime())
        self.requests = [self._request(number) for number in range(4 * num_endpoints)]
        self.conversations = [self._request(number) for number in range(_NUM_ROUNDS * _PICKS_A_ROUND)]
        for number, endpoint in enumerate(self.registry):
            self._load(endpoint, self.requests[number::num_endpoints])

    def _request(self, number: int) -> InferenceRequest:
        hashes = (
            *range(_NUM_SHARED_BLOCKS),
            *(self._source.getrandbits(64) for _ in range(_NUM_BLOCKS - _NUM_SHARED_BLOCKS)),
        )
        prefix = BlockHashes(_NUM_BLOCKS * _BLOCK_TOKENS, hashes)
        return InferenceRequest(Completions(), "m", True, prefix, f"request-{number}")

    def _load(self, endpoint: Endpoint, requests: list[InferenceRequest]) -> None:
        endpoint.load.scraped(self._source.random(), 400_000, 0, 0.0)
        for request in requests:
            assert request.prefix is not None
            self.index.insert(endpoint.url, request.prefix, 0.0, None)
            placement = self.picker.pick(request, [endpoint], {}, 0.0)
            assert placement is not None
            self.ledger.dispatch(request, placement, self._source.random())


def _microseconds(action: Callable[[InferenceRequest], object], requests: list[InferenceRequest]) -> float:
    rounds = []
    for number in range(_NUM_ROUNDS):
        begin = time.thread_time()
        for pick in range(_PICKS_A_ROUND):
            action(requests[(number * _PICKS_A_ROUND + pick) % len(requests)])
        rounds.append((time.thread_time() - begin) / _PICKS_A_ROUND)
    return min(rounds) * 1e6


def _measure(num_endpoints: int) -> tuple[float, float, float, float]:
    fleet = _Fleet(num_endpoints)

    def match(request: InferenceRequest) -> dict[str, int]:
        assert request.prefix is not None
        return dict(fleet.index.match(request.prefix, 1.0))

    def place(request: InferenceRequest) -> Placement:
        placement = fleet.picker.pick(request, fleet.registry.serving("m"), cached, 1.0)
        assert placement is not None
        return placement

    def dispatch_and_finish(request: InferenceRequest) -> None:
        ticket: Ticket
        (ticket,) = fleet.ledger.dispatch(request, placement, 1.0)
        ticket.first_token(1.1)
        ticket.finish()

    cached = match(fleet.requests[0])
    placement = place(fleet.requests[0])
    return (
        _microseconds(match, fleet.requests),
        _microseconds(place, fleet.conversations),
        _microseconds(place, fleet.requests),
        _microseconds(dispatch_and_finish, fleet.requests),
    )


def main() -> None:
    print(
        "| endpoints | match, us | place, us | again, us | dispatch to end, us | all, us |\n|---|---|---|---|---|---|"
    )
    for num_endpoints in (8, 64):
        match, place, again, dispatch = _measure(num_endpoints)
        total = match + place + dispatch
        print(f"| {num_endpoints} | {match:.1f} | {place:.1f} | {again:.1f} | {dispatch:.1f} | {total:.1f} |")


if __name__ == "__main__":
    main()
