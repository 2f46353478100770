"""Blocks that an endpoint is expected to hold because a request was just sent there, until its events tell.

Two maps take turns, so that growing old costs nothing a block: a guess lives for one to two lifetimes.
"""

from collections.abc import Iterable, Sequence


class Guesses:
    """`bit` stands for an endpoint; times are seconds of any steady clock."""

    def __init__(self, lifetime_seconds: float) -> None:
        self._lifetime_seconds = lifetime_seconds
        self._new: dict[int, int] = {}  # block key -> bits of the endpoints
        self._old: dict[int, int] = {}
        self._new_dispatches: list[tuple[int, Sequence[int]]] = []  # bit, block keys
        self._old_dispatches: list[tuple[int, Sequence[int]]] = []
        self._new_since = float("-inf")

    @property
    def max_age_seconds(self) -> float:
        return 2 * self._lifetime_seconds

    def rotate(self, now: float) -> None:
        """Before any of the others, with the time of now."""
        age = now - self._new_since
        if age < self._lifetime_seconds:
            return
        is_recent = age < self.max_age_seconds
        self._old, self._old_dispatches = (self._new, self._new_dispatches) if is_recent else ({}, [])
        self._new, self._new_dispatches, self._new_since = {}, [], now

    def add(self, keys: Sequence[int], bit: int) -> None:
        """Of one dispatch, in the prompt's order."""
        if not keys:
            return
        self._new_dispatches.append((bit, keys))
        new = self._new
        for key in keys:
            new[key] = new.get(key, 0) | bit

    def withdraw(self, chain: Sequence[int], bit: int) -> None:
        """The dispatch of that prompt has failed: what no other dispatch there is expected to leave is not expected."""
        for dispatches in (self._new_dispatches, self._old_dispatches):
            for number, (its_bit, keys) in enumerate(dispatches):
                if its_bit == bit and keys[-1] == chain[-1]:
                    del dispatches[number]
                    self.remove(self._left_by_nobody(keys, bit), bit)
                    return

    def _left_by_nobody(self, keys: Sequence[int], bit: int) -> set[int]:
        others = (its_keys for its_bit, its_keys in (*self._new_dispatches, *self._old_dispatches) if its_bit == bit)
        return set(keys).difference(*others)

    def remove(self, keys: Iterable[int], bit: int) -> None:
        for guesses in (self._new, self._old):
            if guesses:
                for key in keys:
                    if bits := guesses.get(key):
                        guesses[key] = bits & ~bit

    def holders(self, key: int) -> int:
        """Bits of the endpoints that are expected to hold the block."""
        return self._new.get(key, 0) | self._old.get(key, 0)
