"""Which of an engine's numbered messages are applied, when some are asked for again, and when what is known is void.

An engine numbers its messages from 0 and keeps the last of them for replay. Messages come in order; they may be lost or
come twice (live and replayed), and an engine that was restarted begins at 0 again. So a replay starts one message
early, at one that was seen before: if its content has changed, this is another process, whose cache began empty.

Decides only: what it returns is to be done, in order, by whoever owns the sockets.
"""

from collections import OrderedDict
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class Apply:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Nothing known of the cache holds. `is_complete`: what follows is its whole history."""

    is_complete: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages are gone for good: what is known may no longer hold, and what is cached may not be known."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask for everything from `start` on; a replay that still runs is given up."""

    start: int


Action = Apply | Reset | Lost | Replay


@dataclass(slots=True)
class _RunningReplay:
    is_resync: bool  # from the engine's first message on; else from the last one seen
    is_empty: bool = True
    is_stale: bool = False  # the connection has broken since: whoever was asked may be gone


class EventOrder:
    """Begins with `resync`. Live messages wait while a replay runs: from its Replay to its end or failure.

    The contents of `max_recent` messages are remembered. Of live ones that wait, `max_pending` are kept; beyond, the
    oldest are lost.
    """

    def __init__(self, max_recent: int = 1024, max_pending: int = 4096) -> None:
        self._max_recent = max_recent
        self._max_pending = max_pending
        self._next: int | None = None  # None: nothing is known yet
        self._recent: OrderedDict[int, int] = OrderedDict()  # number -> its content's hash
        self._replay: _RunningReplay | None = None
        self._pending: list[tuple[int, bytes]] = []
        self._has_history = False  # as far back as the engine remembers
        self._is_doubtful = False  # the connection has broken, and nobody has looked yet whether something is missing
        self._must_verify = False  # once the replay that runs has ended
        self.num_gaps = 0
        self.num_replays = 0

    def resync(self) -> list[Action]:
        """Learn everything again: at the start, and when the engine is known to be another process."""
        self._forget()
        self._pending.clear()
        return [Reset(is_complete=False), *self._ask(0, is_resync=True)]

    def receive(self, number: int, payload: bytes) -> list[Action]:
        """A live message."""
        if self._replay is not None:
            self._wait(number, payload)
            return []
        if self._next is None:
            return self._begin(number, payload)
        if number == self._next:
            return [self._apply(number, payload)]
        if number > self._next:
            self.num_gaps += 1
            self._wait(number, payload)
            return self._ask_from_last_seen()
        if self._recent.get(number) == xxh3_64_intdigest(payload):
            return []
        actions = self.resync()
        self._wait(number, payload)
        return actions

    def disconnected(self) -> None:
        """Messages may be lost without a later one that shows it: the next `verify` finds out."""
        self._is_doubtful = True
        if self._replay is not None:
            self._replay.is_stale = True

    def verify(self) -> list[Action]:
        """Is anything missing? To be called now and then, and after each connect."""
        if self._replay is not None and not self._replay.is_stale:
            self._must_verify = True
            return []
        return self._ask_from_last_seen() if self._has_history else self._ask(0, is_resync=True)

    def replayed(self, number: int, payload: bytes) -> list[Action]:
        replay = self._replay
        if replay is None:
            return []
        is_first, replay.is_empty = replay.is_empty, False
        if self._next is None or (is_first and replay.is_resync):
            return self._begin(number, payload)
        if number >= self._next:
            is_next = number == self._next and not is_first
            return [self._apply(number, payload)] if is_next else [Lost(), self._apply(number, payload)]
        if self._recent.get(number) == xxh3_64_intdigest(payload):
            return []
        # Another process: what runs is its whole history if it begins with its first message.
        return self._begin(number, payload) if is_first and number == 0 else self.resync()

    def replay_ended(self) -> list[Action]:
        replay, self._replay = self._replay, None
        if replay is None:
            return []
        if replay.is_empty and not replay.is_resync:
            return self.resync()  # it does not know its own message: another process, which has sent none yet
        # What has waited since before the connection broke may be of a process that is gone.
        must_verify = self._must_verify or (self._is_doubtful and bool(self._pending))
        actions = self._begin_empty() if replay.is_empty else []
        self._must_verify = False
        self._has_history, self._is_doubtful = self._next is not None, False
        actions += self._skip_gap() + self._receive_pending()
        return actions + self.verify() if must_verify else actions

    def replay_failed(self) -> list[Action]:
        """No answer, or no end of it: the engine keeps nothing for replay, or is not there."""
        if self._replay is None:
            return []
        self._replay = None
        was_doubtful, self._is_doubtful = self._is_doubtful, False
        gap = self._skip_gap()
        actions = self._receive_pending()
        if not was_doubtful:
            return gap + actions
        # What waited may have come before the connection broke, from a process that is gone.
        return actions if self._next is None else [*actions, Lost()]

    def _ask(self, start: int, *, is_resync: bool) -> list[Action]:
        self.num_replays += 1
        self._replay = _RunningReplay(is_resync)
        return [Replay(start)]

    def _ask_from_last_seen(self) -> list[Action]:
        return self._ask(self._next - 1, is_resync=False) if self._next else self._ask(0, is_resync=True)

    def _begin(self, number: int, payload: bytes) -> list[Action]:
        self._recent.clear()
        return [Reset(is_complete=number == 0), self._apply(number, payload)]

    def _begin_empty(self) -> list[Action]:
        """The engine has sent nothing yet, or keeps nothing: then the messages that wait are its latest."""
        if self._pending and self._pending[0][0] > 0:
            self._forget()
            return []
        is_news, self._next = self._next != 0, 0
        return [Reset(is_complete=True)] if is_news else []

    def _forget(self) -> None:
        self._next, self._has_history, self._is_doubtful = None, False, False
        self._recent.clear()

    def _apply(self, number: int, payload: bytes) -> Apply:
        self._recent[number] = xxh3_64_intdigest(payload)
        if len(self._recent) > self._max_recent:
            self._recent.popitem(last=False)
        self._next = number + 1
        return Apply(payload)

    def _wait(self, number: int, payload: bytes) -> None:
        self._pending.append((number, payload))
        if len(self._pending) > self._max_pending:
            del self._pending[0]

    def _skip_gap(self) -> list[Action]:
        """What a replay has not brought before the messages that wait is lost."""
        if self._next is None or not self._pending or self._pending[0][0] <= self._next:
            return []
        self._next = self._pending[0][0]
        return [Lost()]

    def _receive_pending(self) -> list[Action]:
        pending, self._pending = self._pending, []
        actions: list[Action] = []
        for number, payload in pending:
            is_old = self._replay is None and self._next is not None and number < self._next
            if is_old and not self._was_replayed(number, payload):
                # Of a process that is gone, or of one that has come meanwhile: the next replay brings what it has sent,
                # and what waits must not be compared with that once more, or there would be no end.
                return actions + self.resync()
            if not is_old:
                actions += self.receive(number, payload)
        return actions

    def _was_replayed(self, number: int, payload: bytes) -> bool:
        """As far as it is remembered: a long replay brings more than that."""
        content = xxh3_64_intdigest(payload)
        return self._recent.get(number, content) == content
