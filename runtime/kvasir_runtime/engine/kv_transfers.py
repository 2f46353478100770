"""The engine core's part in exchanging KV with other engines: it joins the scheduler's blocks to the transfer agent.

The loop calls it as it goes. A request whose prompt another engine computes is held until its blocks have arrived, or
it is clear that they will not; then it goes on like any other, and finds in the prefix cache what there is. A prompt
that is computed for another engine is offered as it is written, and kept until that one has it.
"""

import itertools
import logging
from dataclasses import dataclass, replace

import msgspec

from kvasir_runtime.engine.messages import RequestsMove
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import AddressedOutput, Outcome
from kvasir_runtime.scheduling.remote_kv import Arrival
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import (
    BeginOffer,
    BeginPull,
    CancelPull,
    LookUp,
    OfferBlocks,
    OfferEnded,
    Place,
    PullEnded,
    ReadInto,
    Shortened,
    WithdrawOffer,
)
from kvasir_runtime.transfer.metrics import TransferStats
from kvasir_runtime.transfer.params import KvTransferParams

logger = logging.getLogger(__name__)

ASKING_SECONDS = 0.002
"""From the claim to the first byte, and for the agent to notice the last: a few polls of a millisecond."""

GRACE_SECONDS = 1.0
UNMEASURED_SECONDS = 4.0
"""Of a prefill whose rate is not known."""


@dataclass(frozen=True, slots=True)
class PullUnderWay:
    arrival: Arrival
    wish: BeginPull


class KvTransfers:
    def __init__(
        self, scheduler: Scheduler, agent: TransferAgent, place: Place, *, page_bytes: int, fails_requests: bool
    ) -> None:
        """`fails_requests`: one whose blocks do not come is ended with an error; else its prompt is computed here."""
        self._scheduler = scheduler
        self._remote = scheduler.remote
        self._agent = agent
        self._place = place
        self._page_bytes = page_bytes
        self._fails_requests = fails_requests
        self._keys: dict[str, str] = {}
        """Of offers, by request id."""
        self._pulls: dict[str, PullUnderWay] = {}
        """By request id."""
        self._num_requests_kept = 0
        self._waiting_for_pages: list[Arrival] = []
        """Those that have no pages yet, or pages that a step under way may touch."""

    @property
    def holds_pages(self) -> bool:
        """Whether pages come free without a step, so that a core which can plan nothing may wait for that."""
        return self._remote.holds_pages

    def add(self, message: AddRequest, prefill_tokens_per_second: float | None) -> None:
        """Take a request in, as its parameters say."""
        params = message.spec.kv_transfer_params or KvTransferParams()
        if params.is_pull and not self._is_here(params):
            self._add_pulling(message, params, prefill_tokens_per_second)
        else:
            self._scheduler.add(message)
            if params.is_pull:
                self._keep_no_longer(params)
        if params.do_remote_decode:
            self._offer(message, params)

    def moving(self, http_request_id: str | None) -> RequestsMove:
        """What API processes must know to hand requests over to another engine."""
        return RequestsMove(host=self._place.host, port=self._place.port, http_request_id=http_request_id)

    def keep(self, request_id: str) -> None:
        """Offer what is written of a request that goes on in another engine; to be called before it is aborted."""
        self._num_requests_kept += 1
        self._offer_cached(f"moved:{request_id}", request_id, self._scheduler.hashes_of(request_id))

    def abort(self, request_id: str) -> None:
        """The scheduler has forgotten the request, or one of its sequences."""
        if request_id in self._pulls and not self._scheduler.knows(request_id):
            self._agent.post(CancelPull(request_id))

    def receive(self) -> list[AddressedOutput]:
        """What the agent has to tell, and what that comes to for clients; arrivals get their pages."""
        outputs: list[AddressedOutput] = []
        for event in self._agent.take():
            match event:
                case Shortened():
                    self._shorten(event)
                case PullEnded():
                    outputs += self._end_pull(event)
                case OfferEnded():
                    self._keys.pop(event.request_id, None)
                    self._remote.end_offer(event.request_id)
                case LookUp():
                    self._look_up(event)
        self._give_pages()
        return outputs

    def publish(self, outcome: Outcome) -> None:
        """A turn has ended: tell of what it wrote, and answer those whose prompt is ready for others."""
        outcome.outputs = [self._with_answer(addressed) for addressed in outcome.outputs]
        for news in self._remote.take_news():
            key = self._keys[news.request_id]
            if news.has_failed:
                del self._keys[news.request_id]
                reason = "the request that was to write them has ended, or waits while others need their pages"
                self._agent.post(WithdrawOffer(key, news.request_id, reason))
            else:
                self._agent.post(OfferBlocks(key, news.request_id, news.blocks, news.is_complete))

    def stats(self) -> TransferStats:
        stats = self._agent.stats(self._remote.num_leased_blocks)
        return msgspec.structs.replace(stats, num_requests_kept=self._num_requests_kept)

    def _offer(self, message: AddRequest, params: KvTransferParams) -> None:
        key = self._keys[message.request_id] = params.transfer_id or message.request_id
        self._remote.offer(message.request_id, message.spec.num_prompt_tokens)
        self._agent.post(BeginOffer(key, message.request_id, is_announced=params.transfer_id is not None))

    def _is_here(self, params: KvTransferParams) -> bool:
        """A request that was handed over and not taken comes back to where its blocks are."""
        return (params.remote_host, params.remote_port) == (self._place.host, self._place.port)

    def _keep_no_longer(self, params: KvTransferParams) -> None:
        """The request itself finds its blocks in the cache."""
        kept = [request_id for request_id, key in self._keys.items() if key == params.remote_key]
        for request_id in kept:
            key = self._keys.pop(request_id)
            self._remote.end_offer(request_id)
            self._agent.post(WithdrawOffer(key, request_id, "its request goes on where they are"))

    def _add_pulling(self, message: AddRequest, params: KvTransferParams, rate: float | None) -> None:
        request_id, is_lookup = message.request_id, params.remote_key is None
        self._scheduler.add(message, is_held=True)
        arrival = self._remote.expect(request_id)
        if is_lookup and not self._can_be_looked_up(arrival, rate):
            self._remote.forget(request_id)
            self._scheduler.release(request_id)
            return
        assert params.remote_host is not None
        assert params.remote_port is not None
        wish = BeginPull(
            request_id=request_id,
            host=params.remote_host,
            port=params.remote_port,
            key=params.remote_key or f"{self._place.engine_id}:{request_id}",
            hashes=arrival.hashes,
            first=arrival.first,
            is_lookup=is_lookup,
            patience_seconds=self._patience_seconds(arrival, rate) if is_lookup else None,
        )
        self._pulls[request_id] = PullUnderWay(arrival, wish)
        self._agent.post(wish)
        if arrival.is_missing_some:
            self._waiting_for_pages.append(arrival)
        else:  # the other side alone is to hear of it
            self._agent.post(ReadInto(request_id, {}))
            self._scheduler.release(request_id)

    def _can_be_looked_up(self, arrival: Arrival, rate: float | None) -> bool:
        """It takes its pages at once: what waited for some would keep a peer's blocks held, and its prompt could be
        computed meanwhile."""
        if not arrival.is_missing_some or any(other.pages is None for other in self._waiting_for_pages):
            return False
        return self._is_worth_pulling(arrival, rate) and self._remote.make_room(
            arrival, self._scheduler.last_step_under_way
        )

    def _patience_seconds(self, arrival: Arrival, rate: float | None) -> float:
        return patience_seconds((len(arrival.hashes) - arrival.first) * self._scheduler.block_size, rate)

    def _is_worth_pulling(self, arrival: Arrival, prefill_tokens_per_second: float | None) -> bool:
        """Of a prefix that a peer may have cached; what was computed for this request is pulled anyway."""
        num_missing = len(arrival.hashes) - arrival.first
        return is_worth_pulling(
            num_missing * self._scheduler.block_size,
            num_missing * len(arrival.blocks.tables) * self._page_bytes,
            tokens_per_second=prefill_tokens_per_second,
            bytes_per_second=self._agent.bytes_per_second,
        )

    def _give_pages(self) -> None:
        """To arrivals, in the order in which they came."""
        for arrival in list(self._waiting_for_pages):
            if arrival.pages is None and not self._remote.make_room(arrival, self._scheduler.last_step_under_way):
                return
            if self._scheduler.has_ended(arrival.after_step):
                assert arrival.pages is not None
                self._waiting_for_pages.remove(arrival)
                self._agent.post(ReadInto(arrival.request_id, arrival.pages, len(arrival.hashes)))

    def _shorten(self, event: Shortened) -> None:
        """It has its turn before others: the pages that it takes are among those that it has given back."""
        arrival = self._pulls[event.request_id].arrival
        self._remote.shorten(arrival, event.num_blocks, self._scheduler.last_step_under_way)
        if arrival not in self._waiting_for_pages:
            self._waiting_for_pages.insert(0, arrival)

    def _end_pull(self, event: PullEnded) -> list[AddressedOutput]:
        pull = self._pulls.pop(event.request_id)
        self._stop_waiting(pull.arrival)
        self._remote.settle(event.request_id, event.num_blocks)
        failure = event.failure
        if failure is not None and failure.reason != "cancelled":
            logger.warning("%s", failure.message, extra={"request_id": event.request_id})
            if self._fails_requests and not pull.wish.is_lookup:
                return self._scheduler.give_up(event.request_id, f"its prompt cannot be had: {failure.message}")
        self._scheduler.release(event.request_id)
        return []

    def _stop_waiting(self, arrival: Arrival) -> None:
        if arrival in self._waiting_for_pages:
            self._waiting_for_pages.remove(arrival)

    def _look_up(self, event: LookUp) -> None:
        """A peer asks for what is cached here."""
        self._offer_cached(f"lookup:{event.key}", event.key, event.hashes)

    def _offer_cached(self, offer_id: str, key: str, hashes: list[bytes]) -> None:
        self._keys[offer_id] = key
        self._remote.offer_cached(offer_id, hashes)
        self._agent.post(BeginOffer(key, offer_id))

    def _with_answer(self, addressed: AddressedOutput) -> AddressedOutput:
        output = addressed.output
        if output.request_id not in self._keys or output.finish_reason not in ("stop", "length"):
            return addressed
        params = self._answer(output.request_id)
        return replace(addressed, output=msgspec.structs.replace(output, kv_transfer_params=params))

    def _answer(self, request_id: str) -> KvTransferParams:
        """What the decode leg is to be asked with."""
        ids = self._remote.block_ids(request_id)
        by_group = [[block_id for block_id in group if block_id is not None] for group in zip(*ids, strict=True)]
        key = self._keys[request_id]
        return KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._place.engine_id,
            remote_request_id=request_id,
            remote_block_ids=[*by_group] if len(by_group) > 1 else [*itertools.chain.from_iterable(by_group)],
            remote_host=self._place.host,
            remote_port=self._place.port,
            tp_size=self._place.tensor_size,
            dcp_size=1,
            pp_size=self._place.pipeline_size,
            transfer_mode="pull",
            remote_num_tokens=len(ids) * self._scheduler.block_size,
            transfer_id=None if key == request_id else key,
        )


def patience_seconds(num_tokens: int, tokens_per_second: float | None) -> float:
    """How long a lookup may take before the prompt is computed here."""
    return GRACE_SECONDS + (UNMEASURED_SECONDS if tokens_per_second is None else num_tokens / tokens_per_second)


def is_worth_pulling(
    num_tokens: int, num_bytes: int, *, tokens_per_second: float | None, bytes_per_second: float | None
) -> bool:
    """Whether fetching a cached prefix from a peer beats computing it.

    A rate that was not measured yet is found out by pulling.
    """
    if tokens_per_second is None or bytes_per_second is None:
        return True
    return ASKING_SECONDS + num_bytes / bytes_per_second < num_tokens / tokens_per_second
