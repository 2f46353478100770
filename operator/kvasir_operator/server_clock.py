"""The clock of a machine that answers over HTTP: what it says of times is by its own clock, and others may differ."""

import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_SAME_SECONDS: Final = 2.0
"""Clocks that differ by less are one: an answer's date has whole seconds, and takes its time."""


class ServerClock:
    """`ahead_seconds`: of this machine's clock, as of the last date that was noted."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def note(self, date: str | None) -> None:
        """The header `Date` of an answer that has just come."""
        with suppress(ValueError, TypeError):
            ahead = parsedate_to_datetime(date or "").timestamp() - time.time()
            self.ahead_seconds = ahead if abs(ahead) > _SAME_SECONDS else 0.0

    def unix(self) -> float:
        return time.time() + self.ahead_seconds

    def text(self) -> str:
        """RFC 3339, to the second."""
        return datetime.fromtimestamp(self.unix(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
