"""A transfer agent without a thread, a network or peers: the test says what becomes of each pull and offer.

Other engines have whatever there may be, and read what is offered at the last moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.runtime.scheduling.fake_rank import FakeRank

from kvasir_runtime.kv_cache.blocks import hash_blocks
from kvasir_runtime.transfer.commands import (
    BeginOffer,
    BeginPull,
    BlockIds,
    CancelPull,
    Failure,
    FromAgent,
    LookUp,
    OfferBlocks,
    OfferedBlock,
    OfferEnded,
    PullEnded,
    ReadInto,
    Shortened,
    ToAgent,
    WithdrawOffer,
)


@dataclass
class Pull:
    wish: BeginPull
    num_read: int
    """Blocks that are here."""
    pages: dict[int, BlockIds] | None = None
    """None: there are no pages for them yet."""

    @property
    def is_waited_for(self) -> bool:
        return self.wish.first < len(self.wish.hashes)


@dataclass
class Offer:
    key: str
    blocks: list[OfferedBlock] = field(default_factory=list)
    is_complete: bool = False


class FakeAgent:
    bytes_per_second = None

    def __init__(self, rank: FakeRank, contents: dict[bytes, list[int]]) -> None:
        """`contents`: of each block that there may be, the tokens from the beginning of its sequence on."""
        self._rank = rank
        self._contents = contents
        self.pulls: dict[str, Pull] = {}
        self.offers: dict[str, Offer] = {}
        """Both by request id."""
        self._events: list[FromAgent] = []
        self._num_look_ups = 0

    @property
    def awaited(self) -> set[str]:
        """Requests that are held for their blocks."""
        ended = {event.request_id for event in self._events if isinstance(event, PullEnded)}
        return ended | {request_id for request_id, pull in self.pulls.items() if pull.is_waited_for}

    @property
    def frees_pages(self) -> bool:
        """Without the engine's doing: pulls end, and so do leases, which begin with the last block."""
        return any(pull.pages is not None for pull in self.pulls.values()) or any(
            offer.blocks and offer.is_complete for offer in self.offers.values()
        )

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def is_busy(self) -> bool:
        return bool(self.pulls or self.offers or self._events)

    def learn(self, token_ids: Sequence[int]) -> list[bytes]:
        """There may be blocks of these tokens; their hashes."""
        size = self._rank.block_size
        hashes = hash_blocks(None, token_ids[: len(token_ids) // size * size], size)
        self._contents |= {each: list(token_ids[: (index + 1) * size]) for index, each in enumerate(hashes)}
        return hashes

    # --- what the core sees ---

    def post(self, *commands: ToAgent) -> None:
        for command in commands:
            match command:
                case BeginPull():
                    self.pulls[command.request_id] = Pull(command, command.first)
                case ReadInto():
                    pull = self.pulls[command.request_id]
                    if command.num_blocks in (None, len(pull.wish.hashes)):  # else it was shortened meanwhile
                        pull.pages = command.block_ids
                case CancelPull():
                    pass  # it may take any time
                case BeginOffer():
                    self._replace(command.key)
                    self.offers[command.request_id] = Offer(command.key)
                case OfferBlocks() if (offer := self.offers.get(command.request_id)) is not None:
                    self._look_at(command.blocks)
                    offer.blocks += command.blocks
                    offer.is_complete = command.is_complete
                case WithdrawOffer():
                    self.offers.pop(command.request_id, None)

    def _replace(self, key: str) -> None:
        for request_id in [request_id for request_id, offer in self.offers.items() if offer.key == key]:
            del self.offers[request_id]
            self._events.append(OfferEnded(request_id, "replaced"))

    def take(self) -> list[FromAgent]:
        events, self._events = self._events, []
        return events

    # --- what the test lets happen ---

    def read(self, request_id: str, num_blocks: int) -> None:
        """The next so many blocks of a pull, if it has pages for them."""
        pull = self.pulls[request_id]
        if pull.pages is not None:
            last = min(pull.num_read + num_blocks, len(pull.wish.hashes))
            for index in range(pull.num_read, last):
                self._rank.read_into(pull.pages.get(index, ()), index, self._contents[pull.wish.hashes[index]])
            pull.num_read = last

    def end_pull(self, request_id: str) -> None:
        """As it stands: where the rest was to come is something else."""
        pull = self.pulls.pop(request_id)
        failure = None if pull.num_read == len(pull.wish.hashes) else Failure("cancelled", "the test ended it")
        for index, block_ids in (pull.pages or {}).items():
            if index >= pull.num_read:
                self._rank.read_into(block_ids, index, None)
        self._events.append(PullEnded(request_id, pull.num_read, failure))

    def shorten(self, request_id: str) -> bool:
        """Of a pull's blocks the last is not to be had. False: that is no way to begin."""
        pull = self.pulls[request_id]
        if pull.num_read > pull.wish.first or pull.wish.first >= len(pull.wish.hashes) - 1:
            return False
        pull.wish, pull.pages = replace(pull.wish, hashes=pull.wish.hashes[:-1]), None
        self._events.append(Shortened(request_id, len(pull.wish.hashes)))
        return True

    def look_up(self, hashes: list[bytes]) -> None:
        self._num_look_ups += 1
        self._events.append(LookUp(f"key-{self._num_look_ups}", hashes))

    def end_offer(self, request_id: str) -> None:
        """Whoever came for the blocks has read them all just now."""
        self._look_at(self.offers.pop(request_id).blocks)
        self._events.append(OfferEnded(request_id, "pulled"))

    def _look_at(self, blocks: list[OfferedBlock]) -> None:
        for block in blocks:
            token_ids, size = self._contents[block.block_hash], self._rank.block_size
            for block_id in block.block_ids:
                for offset in range(0 if block_id is None else size):
                    expected = tuple(token_ids[: len(token_ids) - size + offset + 1])
                    held = self._rank.slots.get((block_id, offset))
                    assert held == expected, f"offered as {expected}, holds {held}"
