"""Blocks that other engines read from here, and those that are pulled from others, as the scheduler sees them.

Both are held beside the sequences, since they outlive or precede the requests: an offer from when a block is written
until the other side has it, an arrival from before the pull until nothing writes it any more. A block that a step under
way may still write or read is not pulled into before that step has ended.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from kvasir_runtime.kv_cache.blocks import Block, SequenceBlocks
from kvasir_runtime.kv_cache.kept_blocks import LentBlocks
from kvasir_runtime.scheduling.request import Sequence
from kvasir_runtime.scheduling.sequences import Sequences
from kvasir_runtime.scheduling.step import Rows
from kvasir_runtime.transfer.commands import BlockIds, OfferedBlock


@dataclass(slots=True, eq=False)
class Arrival:
    """Blocks that are pulled from another engine for one held request."""

    request_id: str
    token_ids: list[int]
    blocks: SequenceBlocks
    hashes: list[bytes]
    """Of all full blocks that are worth having: a token is left to compute."""
    first: int
    """The first of them that was not cached when the request came."""
    pages: dict[int, BlockIds] | None = None
    """To read into. By index: the new blocks of each KV group; None until there are pages for them."""
    after_step: int | None = None
    """Number of the last step that may touch the new blocks; None: none does."""

    @property
    def is_missing_some(self) -> bool:
        return self.first < len(self.hashes)


@dataclass(slots=True, eq=False)
class Offer:
    request_id: str
    num_blocks: int
    """When it is complete: the full blocks behind which a prompt token is left."""
    lent: LentBlocks
    blocks: list[OfferedBlock] = field(default_factory=list)
    num_announced: int = 0
    is_announced_complete: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.blocks) == self.num_blocks


@dataclass(frozen=True, slots=True)
class OfferNews:
    """What became of an offer since the last call of `take_news`."""

    request_id: str
    blocks: list[OfferedBlock]
    is_complete: bool
    has_failed: bool
    """Its request ended or was preempted before; nothing of it is held any more."""


class RemoteKv:
    def __init__(self, sequences: Sequences) -> None:
        self._kv = sequences.kv
        self._kept = sequences.kept
        self._sequences = sequences
        self._rows = sequences.rows
        self._arrivals: dict[str, Arrival] = {}
        self.offers: dict[str, Offer] = {}
        """Of blocks that are kept for other engines."""

    @property
    def num_leased_blocks(self) -> int:
        """Held for other engines."""
        return sum(len(offer.lent.blocks) for offer in self.offers.values())

    @property
    def holds_pages(self) -> bool:
        """Whether pages are held that come free without a step."""
        return any(offer.lent.blocks and offer.is_complete for offer in self.offers.values()) or any(
            arrival.pages is not None for arrival in self._arrivals.values()
        )

    def expect(self, request_id: str) -> Arrival:
        """Find what a held request lacks: no block where all of its prompt must be computed here, or it has gone."""
        sequence = self._sequences.first_held(request_id)
        if sequence is None or sequence.request.lacks_prompt_logprobs:
            arrival = Arrival(request_id, [], self._kv.empty(), [], first=0)
        else:
            token_ids, blocks = sequence.token_ids, self._kv.empty(sequence.blocks.extra_keys)
            hashes = self._kv.hashes_to_look_up(token_ids, blocks)
            num_cached = self._kv.match(token_ids, blocks).num_tokens // self._kv.block_size
            arrival = Arrival(request_id, token_ids, blocks, hashes, first=num_cached)
        self._arrivals[request_id] = arrival
        return arrival

    def forget(self, request_id: str) -> None:
        """Drop an arrival for which no pages were taken."""
        self._arrivals.pop(request_id, None)

    def make_room(self, arrival: Arrival, last_step: int | None) -> bool:
        """Take the pages to read into, where they are free. `last_step`: the last that is under way."""
        new = self._kv.arrange(arrival.token_ids, arrival.blocks, len(arrival.hashes))
        if new is None:
            return False
        num_groups = len(arrival.blocks.tables)
        pages: dict[int, list[int | None]] = {}
        for group, index, block_id in new:
            pages.setdefault(index, [None] * num_groups)[group] = block_id
        arrival.pages = {index: tuple(ids) for index, ids in pages.items()}
        arrival.after_step = last_step
        return True

    def shorten(self, arrival: Arrival, num_blocks: int, last_step: int | None) -> None:
        """Expect the first `num_blocks` only, none of them read yet: give back the pages that they do not need."""
        arrival.hashes = arrival.hashes[:num_blocks]
        if arrival.pages is not None:
            self._kv.release(arrival.blocks)
            arrival.pages = None
            self.make_room(arrival, last_step)

    def settle(self, request_id: str, num_blocks: int) -> None:
        """End an arrival whose first `num_blocks` blocks hold what they should. These can be found from now on, and are
        held for the request if it waits. Other pages are freed, since it needs them to compute the rest."""
        arrival = self._arrivals.pop(request_id)
        if arrival.pages is not None:
            kv, token_ids, blocks = self._kv, arrival.token_ids, arrival.blocks
            kv.offer_written(token_ids, blocks, self._num_good(arrival, num_blocks) * kv.block_size)
            kv.release(blocks)
            waiting = self._sequences.first_held(request_id)
            if waiting is not None and waiting.request.num_cached_tokens is None:
                waiting.request.num_cached_tokens = arrival.first * kv.block_size
            if self._sequences.is_known(request_id):
                kv.adopt(blocks, kv.match(token_ids, blocks), 0)
                self._kept.arrived[request_id] = blocks

    def _num_good(self, arrival: Arrival, num_blocks: int) -> int:
        """Of the first `num_blocks` blocks, those before the first that is not as it should be. That may be one which
        was cached, and so was not asked for: it was evicted before there were pages for the rest, or the step that was
        to write it has failed, and no other has written it since."""
        pages = arrival.pages or {}
        for index in range(num_blocks):
            new = pages.get(index, ())
            if new and index < arrival.first:
                return index
            for group, table in enumerate(arrival.blocks.tables):
                is_new = bool(new) and new[group] is not None
                if table[index] is not None and not is_new:
                    block = self._kv.pool.find((group, arrival.hashes[index]))
                    if block is None or block.num_writers:
                        return index
        return num_blocks

    def offer(self, request_id: str, num_prompt_tokens: int) -> None:
        """Keep the blocks of a prompt, as they are written, until `end_offer`."""
        self._begin_offer(request_id, (num_prompt_tokens - 1) // self._kv.block_size)

    def offer_cached(self, offer_id: str, hashes: Series[bytes]) -> None:
        """Keep the longest prefix of this chain of blocks that is cached and written. Of a KV group with a window that
        is what the token behind it sees, and one block before, since the other side may know fewer tokens."""
        self.end_offer(offer_id)
        num_blocks = self._kv.num_written(hashes)
        offer = self._begin_offer(offer_id, num_blocks)
        for index, block_hash in enumerate(hashes[:num_blocks]):
            seeing = self._kv.groups_seeing(index, num_blocks - 1)
            groups = range(self._kv.num_groups)
            found = [self._kv.pool.find((group, block_hash)) if group in seeing else None for group in groups]
            self._hold(offer, block_hash, found)

    def end_offer(self, request_id: str) -> None:
        """Unknown ones have failed meanwhile."""
        if self.offers.pop(request_id, None) is not None:
            self._kept.end_loan(request_id)

    def note_written(self, rows: Rows, num_written: Rows) -> None:
        """Extend offers by the blocks that a step has filled: it left so many tokens written of each row. Rows with
        another occupant since are left out."""
        for row, written in zip(rows.tolist(), num_written.tolist(), strict=True):
            sequence = self._rows.sequences[row]
            offer = None if sequence is None else self.offers.get(sequence.request.request_id)
            if sequence is not None and offer is not None and not offer.lent.was_given_up:
                self._extend(offer, sequence, written)

    def take_news(self) -> list[OfferNews]:
        """Offers that grew, became complete or failed since the last call."""
        news: list[OfferNews] = []
        for offer in list(self.offers.values()):
            new = offer.blocks[offer.num_announced :]
            is_complete = offer.is_complete and not offer.is_announced_complete
            was_lost = offer.lent.was_given_up or not self._sequences.is_known(offer.request_id)
            has_failed = was_lost and not offer.is_complete
            if new or is_complete or has_failed:
                news.append(OfferNews(offer.request_id, new, is_complete, has_failed))
            offer.num_announced, offer.is_announced_complete = len(offer.blocks), offer.is_complete
            if has_failed:
                self.end_offer(offer.request_id)
        return news

    def block_ids(self, request_id: str) -> list[BlockIds]:
        """Of an offer, as far as it is written; none where it has ended."""
        offer = self.offers.get(request_id)
        return [] if offer is None else [block.block_ids for block in offer.blocks]

    def _begin_offer(self, offer_id: str, num_blocks: int) -> Offer:
        lent = self._kept.lend(offer_id)
        offer = self.offers[offer_id] = Offer(offer_id, num_blocks, lent)
        lent.is_complete = offer.is_complete
        return offer

    def _extend(self, offer: Offer, sequence: Sequence, num_written: int) -> None:
        tables, token_ids = sequence.blocks.tables, self._rows.known(sequence.row)
        for index in range(len(offer.blocks), min(num_written // self._kv.block_size, offer.num_blocks)):
            seeing = self._kv.groups_seeing(index, offer.num_blocks)
            blocks = [table[index] if group in seeing else None for group, table in enumerate(tables)]
            self._hold(offer, sequence.blocks.hash_of(token_ids, index), blocks)

    def _hold(self, offer: Offer, block_hash: bytes, blocks: Series[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                self._kv.pool.share(block)
                offer.lent.blocks.append(block)
        ids = tuple(None if block is None else block.block_id for block in blocks)
        offer.blocks.append(OfferedBlock(block_hash, ids))
        offer.lent.is_complete = offer.is_complete
