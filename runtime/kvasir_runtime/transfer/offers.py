"""The prefill side: blocks that are kept for other engines, who was told of which, and how that ends.

An offer's blocks are told to its puller as they are written. Its lease begins with the last of them, since until then
the request that writes them bounds it; every sign of the puller renews it. Plain state: messages and events collect in
lists, and the caller brings the time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir_runtime.transfer.commands import (
    BeginOffer,
    EndOfOffer,
    FromAgent,
    LookUp,
    OfferBlocks,
    OfferedBlock,
    OfferEnded,
    WithdrawOffer,
)
from kvasir_runtime.transfer.connector import Page
from kvasir_runtime.transfer.messages import (
    Beat,
    Blocks,
    Claim,
    Done,
    Elsewhere,
    FromKeeper,
    Heartbeat,
    KeptBy,
    Released,
    Withdrawn,
)
from kvasir_runtime.transfer.metrics import TransferCounts

logger = logging.getLogger(__name__)

MAX_RANKS = 1024
"""Of an engine that asks: parts of pages are looked for in each of its ranks."""
Checksums = Callable[[list[Page], int], list[int]]
"""Of pages, for an engine whose pipeline stages have so many ranks."""


class Leases:
    """Until when something is kept for another engine that may have gone. Times are seconds of one monotonic clock."""

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._deadlines: dict[str, float] = {}

    def begin(self, key: str, now: float) -> None:
        self._deadlines[key] = now + self.lease_seconds

    def renew(self, key: str, now: float) -> None:
        """Of one that has begun; what is not leased yet cannot expire either."""
        if key in self._deadlines:
            self.begin(key, now)

    def end(self, key: str) -> None:
        self._deadlines.pop(key, None)

    def expired(self, now: float) -> list[str]:
        """Keys whose time is over; they are forgotten."""
        over = [key for key, deadline in self._deadlines.items() if deadline <= now]
        for key in over:
            del self._deadlines[key]
        return over

    def next_deadline(self) -> float | None:
        return min(self._deadlines.values(), default=None)


@dataclass(slots=True, eq=False)
class Offer:
    key: str
    request_id: str
    blocks: list[OfferedBlock] = field(default_factory=list)
    is_complete: bool = False
    puller: bytes | None = None
    num_ranks: int = 1
    """Of a pipeline stage of the puller."""
    num_told: int = 0


class Offers:
    def __init__(self, lease_seconds: float, checksums: Checksums | None, counts: TransferCounts) -> None:
        """`checksums` None: none are sent."""
        self._checksums = checksums
        self._counts = counts
        self._offers: dict[str, Offer] = {}
        self._leases = Leases(lease_seconds)
        self._claims: dict[str, tuple[bytes, Claim]] = {}
        """Of keys that nobody has brought yet, and who asks."""
        self._declined: set[str] = set()
        """Keys that nobody has brought yet, and that are not wanted any more."""
        self._ports: dict[str, int] = {}
        """Of other data-parallel ranks, by the keys that they keep."""
        self._early = Leases(lease_seconds)
        """How long any of them is remembered."""
        self.outbox: list[tuple[bytes, FromKeeper]] = []
        self.passed_on: list[tuple[int, Done]] = []
        """To the ranks at these ports, which were not told themselves."""
        self.events: list[FromAgent] = []

    @property
    def are_read(self) -> bool:
        """Whether somebody may be reading what it was told of."""
        return any(offer.puller is not None and offer.blocks for offer in self._offers.values())

    def begin(self, command: BeginOffer, now: float) -> None:
        key = command.key
        self._replace(key)
        offer = self._offers[key] = Offer(key, command.request_id)
        claim, is_declined = self._claims.get(key), key in self._declined
        self._forget_early(key)
        if is_declined:
            self._end(offer, "declined", "")
        elif claim is not None:
            self._attach(offer, *claim, now)

    def refer(self, message: KeptBy, now: float) -> None:
        """Another rank keeps the blocks: who has asked for them, or will, is told."""
        key, port = message.key, message.port
        self._replace(key)
        claim, is_declined = self._claims.get(key), key in self._declined
        self._forget_early(key)
        self._ports[key] = port
        self._early.begin(key, now)
        if is_declined:
            self.passed_on.append((port, Done(key, 0)))
        elif claim is not None:
            puller, _ = claim
            self.outbox.append((puller, Elsewhere(key, port)))

    def _replace(self, key: str) -> None:
        if key in self._offers:
            self._end(self._offers[key], "replaced", "another request came under the same key")

    def add(self, command: OfferBlocks, now: float) -> None:
        """Unknown ones have ended meanwhile."""
        offer = self._offer_of(command.key, command.request_id)
        if offer is None:
            return
        offer.blocks += command.blocks
        if command.is_complete:
            offer.is_complete = True
            self._leases.begin(offer.key, now)
        self._tell(offer)

    def withdraw(self, command: WithdrawOffer) -> None:
        """The core has freed the blocks itself."""
        offer = self._offer_of(command.key, command.request_id)
        if offer is None:
            return
        del self._offers[command.key]
        self._leases.end(command.key)
        self._counts.offer_ended("withdrawn")
        if offer.puller is not None:
            self.outbox.append((offer.puller, Withdrawn(offer.key, command.reason)))

    def _offer_of(self, key: str, request_id: str) -> Offer | None:
        """None where it has ended; another request's may be there by now."""
        offer = self._offers.get(key)
        return offer if offer is not None and offer.request_id == request_id else None

    def receive(self, puller: bytes, message: Claim | Heartbeat | Done, now: float) -> None:
        match message:
            case Claim():
                self._claim(puller, message, now)
            case Heartbeat():
                self._beat(puller, message, now)
            case Done():
                self._finish(puller, message, now)

    def tick(self, now: float) -> None:
        """End what has expired."""
        for key in self._leases.expired(now):
            offer, seconds = self._offers[key], self._leases.lease_seconds
            logger.warning(
                "no engine has asked for %d KV blocks for %g s; they are free again", len(offer.blocks), seconds,
                extra={"request_id": offer.request_id},
            )  # fmt: skip
            self._end(offer, "expired", f"their lease of {seconds:g} s ran out without a heartbeat")
        for key in self._early.expired(now):
            self._forget_early(key)

    def next_deadline(self) -> float | None:
        deadlines = [leases.next_deadline() for leases in (self._leases, self._early)]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _claim(self, puller: bytes, claim: Claim, now: float) -> None:
        if not 1 <= claim.num_ranks <= MAX_RANKS:
            reason = f"an engine of {claim.num_ranks} ranks asks, of 1 to {MAX_RANKS} that there may be"
            self.outbox.append((puller, Withdrawn(claim.key, reason)))
            return
        if claim.key in self._ports:
            self.outbox.append((puller, Elsewhere(claim.key, self._ports[claim.key])))
            return
        former = self._puller_of(claim.key)
        if former is not None and former != puller:
            self.outbox.append((former, Withdrawn(claim.key, "another engine has come for them")))
        offer = self._offers.get(claim.key)
        if offer is not None:
            self._attach(offer, puller, claim, now)
            return
        self._claims[claim.key] = puller, claim
        self._early.begin(claim.key, now)
        if claim.hashes and former is None:
            self.events.append(LookUp(claim.key, claim.hashes))

    def _puller_of(self, key: str) -> bytes | None:
        """Who has claimed it last; None: nobody yet."""
        offer = self._offers.get(key)
        if offer is not None:
            return offer.puller
        return self._claims[key][0] if key in self._claims else None

    def _attach(self, offer: Offer, puller: bytes, claim: Claim, now: float) -> None:
        offer.puller, offer.num_ranks, offer.num_told = puller, claim.num_ranks, claim.first
        self._leases.renew(offer.key, now)
        self._tell(offer)

    def _tell(self, offer: Offer) -> None:
        first, last = offer.num_told, len(offer.blocks)
        if offer.puller is None or not (first < last or offer.is_complete):
            return
        blocks = offer.blocks[first:last]
        ids = [list(block.block_ids) for block in blocks]
        hashes, checksums = [block.block_hash for block in blocks], self._checksums_of(ids, offer.num_ranks)
        self.outbox.append((offer.puller, Blocks(offer.key, first, hashes, ids, checksums, offer.is_complete)))
        offer.num_told = max(first, last)

    def _checksums_of(self, block_ids: list[list[int | None]], num_ranks: int) -> list[list[int | None]] | None:
        if self._checksums is None:
            return None
        known = [
            Page(block_id, group) for ids in block_ids for group, block_id in enumerate(ids) if block_id is not None
        ]
        sums = iter(self._checksums(known, num_ranks))
        return [[None if block_id is None else next(sums) for block_id in ids] for ids in block_ids]

    def _beat(self, puller: bytes, heartbeat: Heartbeat, now: float) -> None:
        for key in heartbeat.keys:
            self._leases.renew(key, now)
            self._early.renew(key, now)
        self.outbox.append((puller, Beat([key for key in heartbeat.keys if key not in self._offers])))

    def _finish(self, puller: bytes, done: Done, now: float) -> None:
        offer, is_its_own = self._offers.get(done.key), self._puller_of(done.key) in (None, puller)
        self.outbox.append((puller, Released(done.key, offer is not None)))
        if offer is not None:
            self._counts.sent(done.num_blocks)
        if not is_its_own:
            return
        if done.key in self._ports:
            self.passed_on.append((self._ports[done.key], done))
        elif offer is None:
            self._forget_early(done.key)
            self._declined.add(done.key)
            self._early.begin(done.key, now)
        else:
            offer.puller = None  # it knows
            self._end(offer, "pulled" if done.num_blocks else "declined", "")

    def _forget_early(self, key: str) -> None:
        self._claims.pop(key, None)
        self._declined.discard(key)
        self._ports.pop(key, None)
        self._early.end(key)

    def _end(self, offer: Offer, reason: EndOfOffer, explanation: str) -> None:
        if offer.puller is not None:
            self.outbox.append((offer.puller, Withdrawn(offer.key, explanation)))
        del self._offers[offer.key]
        self._leases.end(offer.key)
        self._counts.offer_ended(reason)
        self.events.append(OfferEnded(offer.request_id, reason))
