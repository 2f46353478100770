"""The decode side: the pulls under way, chunk by chunk, from asking a peer to a verdict on what arrived.

A pull first needs its peer's handshake, then news of blocks that are written there, and pages of our own to put them
into (`ReadInto`). It reads one run of blocks at a time, checks hashes before and checksums after, and ends well once
everything is here and the peer says that it had kept the blocks until then, or once checksums say as much. Plain state:
what is to be sent, read or told collects in lists, and the caller brings the time.
"""

import math
from dataclasses import dataclass, field, replace

from kvasir_runtime.service_secret import SECRET_VARIABLE
from kvasir_runtime.transfer.commands import (
    BeginPull,
    BlockIds,
    CancelPull,
    Failure,
    FailureReason,
    PullEnded,
    ReadInto,
    Shortened,
)
from kvasir_runtime.transfer.connector import PagePair
from kvasir_runtime.transfer.handshake import refusal
from kvasir_runtime.transfer.messages import (
    Beat,
    Blocks,
    Claim,
    Done,
    Elsewhere,
    FromKeeper,
    FromPuller,
    GetMeta,
    Heartbeat,
    Identity,
    Meta,
    Released,
    Withdrawn,
)
from kvasir_runtime.transfer.metrics import TransferCounts

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""Without a word for so long, a peer is taken for dead."""
UNKNOWN_SECONDS = 5.0
"""How long a peer may not have heard of a request whose legs were sent at once."""
AVOIDED_SECONDS = 30.0
"""How long a peer that could not be reached, or did not answer in time, is not looked up at."""

Endpoint = tuple[str, int]
_PULLED_ALREADY = "another request of this engine pulls them already"


@dataclass(frozen=True, slots=True)
class Read:
    """Pages to read, and what their checksums must be; None: not told."""

    request_id: str
    engine_id: str
    num_ranks: int
    """Of a pipeline stage of that engine."""
    last: int
    """Index behind the last block."""
    pairs: list[PagePair]
    checksums: list[int] | None


@dataclass(slots=True, eq=False)
class Peer:
    endpoint: Endpoint
    last_heard: float
    """Or since when an answer is awaited."""
    next_heartbeat: float
    engine_id: str | None = None
    """None: the handshake is under way."""
    num_ranks: int = 1
    pulls: dict[str, "Pull"] = field(default_factory=dict)
    """By the peer's key."""


@dataclass(slots=True, eq=False)
class Pull:
    wish: BeginPull
    peer: Peer
    began: float
    deadline: float
    num_read: int
    """Blocks from the first of the prompt on that are here."""
    give_up_at: float = math.inf
    pages: dict[int, BlockIds] | None = None
    """None: there is no room for them yet."""
    offered: list[tuple[list[int | None], list[int | None] | None]] = field(default_factory=list)
    """Ids and checksums of the peer's blocks, from index `wish.first` on."""
    is_complete: bool = False
    num_pages: int = 0
    """Read."""
    last_byte: float = 0.0
    is_verified: bool = True
    """Whether all that was read had checksums."""
    read: Read | None = None
    unknown_since: float | None = None
    is_confirming: bool = False
    failure: Failure | None = None

    @property
    def num_offered(self) -> int:
        return min(self.wish.first + len(self.offered), len(self.wish.hashes))

    @property
    def is_timed(self) -> bool:
        """Whether the peer is waited for, and not our own room or a read."""
        waits_for_room = self.pages is None and self.num_read < self.num_offered
        return self.failure is None and not waits_for_room

    def is_due(self, now: float) -> bool:
        return self.is_timed and now >= self.deadline


class Pulls:
    def __init__(self, identity: Identity, num_ranks: int, timeout_seconds: float, counts: TransferCounts) -> None:
        self._identity = identity
        self._num_ranks = num_ranks
        self._timeout = timeout_seconds
        self._counts = counts
        self._peers: dict[Endpoint, Peer] = {}
        self._pulls: dict[str, Pull] = {}
        self._avoided_until: dict[Endpoint, float] = {}
        self.outbox: list[tuple[Endpoint, FromPuller]] = []
        self.new_peers: list[tuple[Endpoint, Meta]] = []
        """Handshakes that went well; the connector is to know them before anything is read."""
        self.lost_peers: list[tuple[Endpoint, str | None]] = []
        """Those that are not talked to any more, with their engine ids."""
        self.reads: list[Read] = []
        self.cancelled_reads: list[str] = []
        """Request ids."""
        self.events: list[PullEnded | Shortened] = []

    def begin(self, wish: BeginPull, now: float) -> None:
        if wish.is_lookup and now < self._avoided_until.get((wish.host, wish.port), -math.inf):
            self.events.append(PullEnded(wish.request_id, wish.first))
            return
        peer = self._peer((wish.host, wish.port), now)
        if wish.key in peer.pulls:
            self._counts.failed("unknown")
            failure = Failure("unknown", f"{wish.key}: {_PULLED_ALREADY}")
            self.events.append(PullEnded(wish.request_id, wish.first, failure))
            return
        pull = Pull(wish, peer, began=now, deadline=now + self._timeout, num_read=wish.first)
        if wish.patience_seconds is not None:
            pull.give_up_at = now + wish.patience_seconds
        self._pulls[wish.request_id] = peer.pulls[wish.key] = pull
        if peer.engine_id is not None:
            self._claim(pull)

    def read_into(self, command: ReadInto, now: float) -> None:
        pull = self._pulls.get(command.request_id)
        if pull is None or pull.failure is not None:
            return
        if command.num_blocks in (None, len(pull.wish.hashes)):  # else it was shortened meanwhile
            pull.pages, pull.deadline = command.block_ids, now + self._timeout
            self._go_on(pull)

    def cancel(self, command: CancelPull) -> None:
        pull = self._pulls.get(command.request_id)
        if pull is not None and pull.failure is None:
            self._fail(pull, "cancelled", "nobody wants the blocks any more")

    def receive(self, endpoint: Endpoint, message: FromKeeper, now: float) -> None:
        peer = self._peers.get(endpoint)
        if peer is None:
            return  # given up
        peer.last_heard = now
        match message:
            case Meta():
                self._greet(peer, message, now)
            case Beat():
                self._look_for_unknown(peer, message, now)
            case _:
                pull = peer.pulls.get(message.key)
                if pull is not None and pull.failure is None:
                    self._hear(pull, message, now)

    def refuse_peer(self, endpoint: Endpoint, reason: str, now: float) -> None:
        """The connector cannot read from it."""
        self._give_up(endpoint, "handshake", reason, now)

    def lose_peer(self, endpoint: Endpoint, now: float) -> None:
        """Its connection broke, or cannot be had."""
        reason = f"there is no connection, or it is refused, as where {SECRET_VARIABLE} differs"
        self._give_up(endpoint, "unreachable", reason, now)

    def read_ended(self, read: Read, failure: Failure | None, now: float) -> None:
        """The read writes nothing any more."""
        pull = self._pulls[read.request_id]
        pull.read = None
        if pull.failure is not None:
            self._end(pull)
        elif failure is not None:
            self._fail(pull, failure.reason, failure.message)
        else:
            pull.num_read, pull.last_byte, pull.deadline = read.last, now, now + self._timeout
            pull.num_pages += len(read.pairs)
            pull.is_verified &= read.checksums is not None
            self._counts.received(len(read.pairs))
            self._go_on(pull)

    def tick(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if not peer.pulls:
                continue
            if now - peer.last_heard >= SILENT_SECONDS:
                self._give_up(peer.endpoint, "unreachable", f"it has said nothing for {SILENT_SECONDS:g} s", now)
            elif now >= peer.next_heartbeat:
                peer.next_heartbeat = now + HEARTBEAT_SECONDS
                self._beat(peer)
        for pull in list(self._pulls.values()):
            if now >= pull.give_up_at and pull.failure is None:
                self._avoid(pull.peer.endpoint, now)
                self._fail(pull, "timeout", "they take longer than computing them")
            elif pull.is_due(now):
                self._avoid(pull.peer.endpoint, now)
                self._fail(pull, "timeout", f"nothing has come for {self._timeout:g} s")

    def _avoid(self, endpoint: Endpoint, now: float) -> None:
        self._avoided_until = {each: until for each, until in self._avoided_until.items() if now < until}
        self._avoided_until[endpoint] = now + AVOIDED_SECONDS

    def next_deadline(self) -> float | None:
        deadlines = [pull.deadline for pull in self._pulls.values() if pull.is_timed]
        deadlines += [
            pull.give_up_at for pull in self._pulls.values() if pull.failure is None and pull.give_up_at < math.inf
        ]
        deadlines += [
            min(peer.next_heartbeat, peer.last_heard + SILENT_SECONDS) for peer in self._peers.values() if peer.pulls
        ]
        return min(deadlines, default=None)

    def _peer(self, endpoint: Endpoint, now: float) -> Peer:
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = self._peers[endpoint] = Peer(endpoint, now, now + HEARTBEAT_SECONDS)
            self.outbox.append((endpoint, GetMeta(0)))
        elif not peer.pulls:  # nothing was awaited of it
            peer.last_heard, peer.next_heartbeat = now, now + HEARTBEAT_SECONDS
        return peer

    def _greet(self, peer: Peer, meta: Meta, now: float) -> None:
        if peer.engine_id is not None:
            return  # asked twice
        reason = refusal(self._identity, meta.identity)
        if reason is not None:
            self._give_up(peer.endpoint, "handshake", reason, now)
            return
        num_stages = len(self._identity.pipeline_cut)
        peer.engine_id, peer.num_ranks = meta.engine_id, len(meta.regions) // num_stages
        self.new_peers.append((peer.endpoint, meta))
        for pull in peer.pulls.values():
            self._claim(pull)

    def _claim(self, pull: Pull) -> None:
        wish = pull.wish
        hashes = wish.hashes if wish.is_lookup else []
        self.outbox.append((pull.peer.endpoint, Claim(wish.key, wish.first, hashes, self._num_ranks)))

    def _beat(self, peer: Peer) -> None:
        message = GetMeta(0) if peer.engine_id is None else Heartbeat(list(peer.pulls))
        self.outbox.append((peer.endpoint, message))

    def _look_for_unknown(self, peer: Peer, beat: Beat, now: float) -> None:
        unknown = set(beat.unknown)
        for key, pull in list(peer.pulls.items()):
            if key not in unknown:
                pull.unknown_since = None
            elif pull.unknown_since is None:
                pull.unknown_since = now
            elif now - pull.unknown_since >= UNKNOWN_SECONDS and pull.failure is None:
                self._fail(pull, "unknown", f"it has not heard of them for {UNKNOWN_SECONDS:g} s")

    def _hear(self, pull: Pull, message: Blocks | Withdrawn | Released | Elsewhere, now: float) -> None:
        match message:
            case Elsewhere():
                self._ask_elsewhere(pull, message.port, now)
            case Blocks():
                pull.deadline = now + self._timeout
                self._take_offered(pull, message)
            case Withdrawn():
                self._fail(pull, "withdrawn", message.reason)
            case Released() if message.was_kept:
                self._end(pull)
            case Released():
                self._fail(pull, "lease", "it had freed the blocks before they were all here")

    def _ask_elsewhere(self, pull: Pull, port: int, now: float) -> None:
        """Another rank of that engine keeps the blocks. None is asked because another of them said so."""
        host, asked_port = pull.peer.endpoint
        if asked_port != pull.wish.port or port == asked_port:
            self._fail(pull, "unknown", f"it says that the rank at port {port} has them")
            return
        peer = self._peer((host, port), now)
        if pull.wish.key in peer.pulls:
            self._fail(pull, "unknown", _PULLED_ALREADY)
            return
        del pull.peer.pulls[pull.wish.key]
        pull.peer = peer
        peer.pulls[pull.wish.key] = pull
        if peer.engine_id is not None:
            self._claim(pull)

    def _take_offered(self, pull: Pull, blocks: Blocks) -> None:
        expected = pull.wish.hashes[blocks.first : blocks.first + len(blocks.hashes)]
        if blocks.first != pull.wish.first + len(pull.offered) or expected != blocks.hashes[: len(expected)]:
            self._fail(pull, "prompt", f"its blocks from number {blocks.first} on are not those of this prompt")
            return
        sums = blocks.checksums if blocks.checksums is not None else [None] * len(blocks.block_ids)
        pull.offered += zip(blocks.block_ids, sums, strict=True)
        pull.is_complete |= blocks.is_complete
        is_untouched = pull.read is None and pull.num_read == pull.wish.first
        if is_untouched and pull.is_complete and pull.wish.first < pull.num_offered < len(pull.wish.hashes):
            self._shorten(pull, pull.num_offered)
        self._go_on(pull)

    def _shorten(self, pull: Pull, num_blocks: int) -> None:
        """What a window sees from the end of these few lies elsewhere than what it sees from the end of all."""
        pull.wish = replace(pull.wish, hashes=pull.wish.hashes[:num_blocks])
        pull.pages = None
        self.events.append(Shortened(pull.wish.request_id, num_blocks))

    def _go_on(self, pull: Pull) -> None:
        """Read what is to be had, or come to an end."""
        if pull.read is not None or pull.pages is None or pull.is_confirming:
            return
        if pull.num_read < pull.num_offered:
            self._read(pull, pull.pages)
        elif pull.is_complete or pull.num_read == len(pull.wish.hashes):
            self._confirm(pull)

    def _read(self, pull: Pull, pages: dict[int, BlockIds]) -> None:
        """Everything that was offered and not read."""
        pairs: list[PagePair] = []
        checksums: list[int] = []
        last = pull.num_offered
        for index in range(pull.num_read, last):
            theirs, sums = pull.offered[index - pull.wish.first]
            for group, ours in enumerate(pages.get(index, ())):
                if ours is None:
                    continue
                source = theirs[group]
                if source is None:
                    self._fail(pull, "prompt", f"it does not have block {index} of KV group {group}")
                    return
                pairs.append(PagePair(ours, source, group))
                if sums is not None and (checksum := sums[group]) is not None:
                    checksums.append(checksum)
        if pairs:
            assert pull.peer.engine_id is not None, "blocks are told of after the handshake"
            told = checksums if len(checksums) == len(pairs) else None
            pull.read = Read(pull.wish.request_id, pull.peer.engine_id, pull.peer.num_ranks, last, pairs, told)
            self.reads.append(pull.read)
        else:
            pull.num_read = last
            self._go_on(pull)

    def _confirm(self, pull: Pull) -> None:
        """Everything is here."""
        pull.is_confirming = True
        self.outbox.append((pull.peer.endpoint, Done(pull.wish.key, pull.num_pages)))
        if pull.is_verified:
            self._end(pull)

    def _fail(self, pull: Pull, reason: FailureReason, message: str) -> None:
        """What is being read is waited for, so that nothing writes its pages afterwards."""
        host, port = pull.peer.endpoint
        pull.failure = Failure(reason, f"the KV blocks of {pull.wish.key} from {host}:{port}: {message}")
        if not pull.is_confirming and reason != "unreachable":
            self.outbox.append((pull.peer.endpoint, Done(pull.wish.key, pull.num_pages)))
        if pull.read is not None:
            self.cancelled_reads.append(pull.wish.request_id)
        else:
            self._end(pull)

    def _give_up(self, endpoint: Endpoint, reason: FailureReason, message: str, now: float) -> None:
        """All pulls from a peer fail; the next one greets it anew."""
        peer = self._peers.pop(endpoint, None)
        if peer is None:
            return
        self._avoid(endpoint, now)
        for pull in list(peer.pulls.values()):
            if pull.failure is None:
                self._fail(pull, reason, message)
        self.lost_peers.append((endpoint, peer.engine_id))

    def _end(self, pull: Pull) -> None:
        del self._pulls[pull.wish.request_id]
        del pull.peer.pulls[pull.wish.key]
        num_good = pull.num_read if pull.failure is None or pull.is_verified else pull.wish.first
        if pull.failure is not None:
            self._counts.failed(pull.failure.reason)
        elif pull.num_pages:
            self._counts.took(pull.last_byte - pull.began)
        self.events.append(PullEnded(pull.wish.request_id, num_good, pull.failure))
