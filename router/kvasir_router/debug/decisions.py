"""The last decisions of this process, with what each replica would have cost.

Costs are of the moment: they are taken when a decision is made, or never. A kept decision holds names and numbers only,
and no request, whose prompt would stay with it. Of a busy router's decisions some are kept, so that it pays next to
nothing for them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvasir_router.placement.pairing import PairedPolicy
from kvasir_router.placement.placement import CostPolicy, Placement, Policy
from kvasir_router.prefix_index.index import Cached
from kvasir_router.request import InferenceRequest
from kvasir_router.service.registry import Endpoint

MAX_DECISIONS = 200
# As many as the log holds may come at once; in the long run so many a second are kept.
KEPT_A_SECOND = 20.0


@dataclass(frozen=True, slots=True)
class EndpointCost:
    url: str
    prefill_url: str | None  # None: it prefills itself
    cached_tokens: int  # where it is prefilled
    terms_seconds: Mapping[str, float]  # their sum is the cost


@dataclass(frozen=True, slots=True)
class Decision:
    number: int  # of this process, counting those that were not kept
    made_at: float  # seconds of the router's clock
    service: str
    request_id: str
    model: str | None
    num_prompt_tokens: int
    url: str
    prefill_url: str | None  # None: `url` prefills itself
    local_prefill: str | None  # why, where another might have
    fetch_url: str | None  # who has more of the prompt cached, and is asked for it; None: nobody is
    cached_tokens: int  # where it is prefilled
    cost_seconds: float | None  # None: the policy compares no costs
    costs: tuple[EndpointCost, ...]  # of all that were compared; empty where the policy compares none


class DecisionLog:
    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._num_made = 0
        self._allowance = float(MAX_DECISIONS)
        self._refilled_at = 0.0

    def __iter__(self) -> Iterator[Decision]:
        """The newest first."""
        return reversed(self._decisions)

    def add(
        self,
        service: str,
        policy: Policy,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        cached: Cached,
        placement: Placement,
        now: float,
    ) -> None:
        """To be called before the dispatch, which changes what the costs are made of."""
        self._num_made += 1
        if not self._may_keep(now):
            return
        prefill = placement.prefill
        decision = Decision(
            number=self._num_made,
            made_at=now,
            service=service,
            request_id=request.request_id,
            model=request.model,
            num_prompt_tokens=request.num_prompt_tokens,
            url=placement.leg.endpoint.url,
            prefill_url=None if prefill is None else prefill.endpoint.url,
            local_prefill=placement.local_prefill,
            fetch_url=None if placement.fetch is None else placement.fetch.peer_url,
            cached_tokens=(prefill or placement.leg).cached_tokens,
            cost_seconds=placement.cost_seconds,
            costs=tuple(
                EndpointCost(
                    url, prefill_url, min(cached.get(prefill_url or url, 0), request.num_prompt_tokens), seconds
                )
                for (url, prefill_url), seconds in _terms(policy, request, endpoints, cached, now).items()
            ),
        )
        self._decisions.append(decision)

    def _may_keep(self, now: float) -> bool:
        refilled = self._allowance + (now - self._refilled_at) * KEPT_A_SECOND
        self._allowance = min(refilled, float(MAX_DECISIONS))
        self._refilled_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


def _terms(
    policy: Policy, request: InferenceRequest, endpoints: Sequence[Endpoint], cached: Cached, now: float
) -> Mapping[tuple[str, str | None], Mapping[str, float]]:
    """By the urls of who decodes and who prefills for it."""
    if isinstance(policy, PairedPolicy):
        return policy.pair_costs(request, endpoints, cached, now)
    if not isinstance(policy, CostPolicy):
        return {}
    return {(url, None): terms for url, terms in policy.costs(request, endpoints, cached, now).items()}
