"""Outlier ejection: endpoints of one service that get no requests because of the errors that they answer with.

Out goes who fails several times in a row, or clearly more often than the others, but never more than half of those
that answer clients: an error that all of them give is the requests' or the model's, and somebody must still answer. An
endpoint whose last answer was an error is a suspect for a while and used where there is no other, so that one that
fails fast does not look idle, and best. Pure bookkeeping: no clock, no network.
"""

import math
from collections.abc import Set
from dataclasses import dataclass, field

from kvasir_router.service.circuit_breaker import CircuitBreaker, CircuitState

_ERRORS_IN_A_ROW = 5
# Errors against the share of all others, once there are enough answers to tell.
_SHARE_ABOVE_OTHERS = 0.4
_MIN_ANSWERS = 10.0
_MEMORY_SECONDS = 20.0
"""Of answers that count in a share."""
SUSPECT_SECONDS = 1.0  # after the first error, and twice as long after each further one


class ErrorShare:
    """The share of an endpoint's recent answers that were errors; old ones fade."""

    def __init__(self) -> None:
        self._num_answers = 0.0
        self._num_errors = 0.0
        self._counted_at = 0.0

    def count(self, *, is_error: bool, now: float) -> None:
        self._fade(now)
        self._num_answers += 1
        self._num_errors += is_error

    def num_answers(self, now: float) -> float:
        self._fade(now)
        return self._num_answers

    def num_errors(self, now: float) -> float:
        self._fade(now)
        return self._num_errors

    def _fade(self, now: float) -> None:
        weight = math.exp(-(now - self._counted_at) / _MEMORY_SECONDS)
        self._num_answers *= weight
        self._num_errors *= weight
        self._counted_at = now


@dataclass(slots=True)
class _Record:
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    share: ErrorShare = field(default_factory=ErrorShare)
    num_errors_in_a_row: int = 0
    suspect_until: float = 0.0


class Ejection:
    """By url. Methods that may change what `max_in_flight` says tell whether they have. `may_eject_all`: where none is
    left, others do what these do.
    """

    def __init__(self, *, may_eject_all: bool = False) -> None:
        self._may_eject_all = may_eject_all
        self._records: dict[str, _Record] = {}

    def follow(self, urls: Set[str]) -> None:
        """These endpoints are ready; what is known of others is forgotten, so that whoever comes back starts afresh.

        Where so many have gone that of the rest more are out than may be, the longest out come back.
        """
        self._records = {url: self._records.get(url) or _Record() for url in urls}
        out = [record for record in self._records.values() if record.breaker.state is not CircuitState.CLOSED]
        out.sort(key=lambda record: record.breaker.tripped_at, reverse=True)
        for record in out[self._most_out :]:
            record.breaker.close()

    def succeeded(self, url: str, now: float) -> bool:
        record = self._records.get(url)
        if record is None:
            return False
        record.share.count(is_error=False, now=now)
        record.num_errors_in_a_row, record.suspect_until = 0, 0.0
        if not record.breaker.succeeded():
            return False
        record.share = ErrorShare()  # its past has been punished
        return True

    def failed(self, url: str, now: float) -> bool:
        record = self._records.get(url)
        if record is None:
            return False
        record.share.count(is_error=True, now=now)
        record.suspect_until = now + SUSPECT_SECONDS * 2 ** min(record.num_errors_in_a_row, _ERRORS_IN_A_ROW)
        record.num_errors_in_a_row += 1
        if record.breaker.state is not CircuitState.CLOSED:
            return record.breaker.failed(now)
        if not self._is_outlier(url, record, now) or self.num_ejected >= self._most_out:
            return False
        record.breaker.trip(now)
        return True

    def busy(self, url: str, until: float) -> None:
        """It takes no requests until then, by its own word."""
        record = self._records.get(url)
        if record is not None:
            record.suspect_until = max(record.suspect_until, until)

    def advance(self, now: float) -> bool:
        """To be called now and then: ejections end."""
        have_ended = [record.breaker.advance(now) for record in self._records.values()]
        return any(have_ended)

    def max_in_flight(self, url: str) -> int | None:
        """0 while it is ejected, 1 while it is tried again; None: no limit."""
        record = self._records.get(url)
        return None if record is None else record.breaker.max_in_flight

    def state(self, url: str) -> CircuitState:
        record = self._records.get(url)
        return CircuitState.CLOSED if record is None else record.breaker.state

    def suspect_until(self, url: str) -> float:
        """Until then it is used where there is no other."""
        record = self._records.get(url)
        return 0.0 if record is None else record.suspect_until

    @property
    def num_ejected(self) -> int:
        return sum(record.breaker.state is not CircuitState.CLOSED for record in self._records.values())

    @property
    def _most_out(self) -> int:
        return len(self._records) if self._may_eject_all else len(self._records) // 2

    def _is_outlier(self, url: str, record: _Record, now: float) -> bool:
        return record.num_errors_in_a_row >= _ERRORS_IN_A_ROW or self._fails_more_than_others(url, record, now)

    def _fails_more_than_others(self, url: str, record: _Record, now: float) -> bool:
        num_answers = record.share.num_answers(now)
        if num_answers < _MIN_ANSWERS:
            return False
        others = [other.share for other_url, other in self._records.items() if other_url != url]
        num_of_others = sum(share.num_answers(now) for share in others)
        share_of_others = sum(share.num_errors(now) for share in others) / num_of_others if num_of_others else 0.0
        return record.share.num_errors(now) / num_answers > share_of_others + _SHARE_ABOVE_OTHERS
