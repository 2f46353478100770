"""Blocks that an endpoint is expected to hold because a request was just sent there, until its events tell.

Two maps take turns, so that growing old costs nothing a block: a guess lives for one to two lifetimes.
"""

from collections.abc import Iterable


class Guesses:
    """`bit` stands for an endpoint; times are seconds of any steady clock."""

    def __init__(self, lifetime_seconds: float) -> None:
        self._lifetime_seconds = lifetime_seconds
        self._new: dict[int, int] = {}  # block key -> bits of the endpoints
        self._old: dict[int, int] = {}
        self._new_since = float("-inf")

    @property
    def max_age_seconds(self) -> float:
        return 2 * self._lifetime_seconds

    def rotate(self, now: float) -> None:
        """Before any of the others, with the time of now."""
        age = now - self._new_since
        if age < self._lifetime_seconds:
            return
        self._old = self._new if age < self.max_age_seconds else {}
        self._new, self._new_since = {}, now

    def add(self, keys: Iterable[int], bit: int) -> None:
        new = self._new
        for key in keys:
            new[key] = new.get(key, 0) | bit

    def remove(self, keys: Iterable[int], bit: int) -> None:
        for guesses in (self._new, self._old):
            if guesses:
                for key in keys:
                    if bits := guesses.get(key):
                        guesses[key] = bits & ~bit

    def holders(self, key: int) -> int:
        """Bits of the endpoints that are expected to hold the block."""
        return self._new.get(key, 0) | self._old.get(key, 0)
