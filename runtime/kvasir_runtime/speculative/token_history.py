"""The last tokens that a rank has seen, of running and finished sequences alike, findable by what stands before them.

A ring of so many tokens, each linked to the ones before and after it in its sequence and to the last place where the
same two tokens of the same domain stood (the hash chains of LZ77). Memory is bounded by the ring; adding a token takes
a few microseconds.
"""

from collections.abc import Iterator

KEY_TOKENS = 2
"""Tokens that must match at least."""
_SHIFT = 32
_NOWHERE = -1


class TokenHistory:
    """Places are numbers that only grow; those `capacity` or more behind the newest are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._end = 0
        self._token = [0] * capacity
        self._before = [_NOWHERE] * capacity
        self._after = [_NOWHERE] * capacity
        self._same = [_NOWHERE] * capacity  # the next older place that ends in the same key
        self._key = [_NOWHERE] * capacity
        self._newest: dict[int, int] = {}  # key -> the newest place that ends in it

    def __len__(self) -> int:
        """Tokens that are remembered."""
        return min(self._end, self._capacity)

    def add(self, token: int, before: int | None, domain: int = 0) -> int:
        """The place of a token that follows the one at `before` in its sequence (None: its first). All of a sequence is
        of one domain, and matches no other's."""
        place, slot = self._end, self._end % self._capacity
        self._forget(slot)
        self._end += 1
        self._token[slot], self._after[slot] = token, _NOWHERE
        self._before[slot] = self._same[slot] = self._key[slot] = _NOWHERE
        if before is not None and self._holds(before):
            earlier = before % self._capacity
            self._after[earlier] = place
            key = domain << 2 * _SHIFT | self._token[earlier] << _SHIFT | token
            self._before[slot], self._key[slot] = before, key
            self._same[slot] = self._newest.get(key, _NOWHERE)
            self._newest[key] = place
        return place

    def token(self, place: int) -> int:
        return self._token[place % self._capacity]

    def last_tokens(self, place: int, most: int) -> list[int]:
        """Up to `most` tokens of the sequence that ends at `place`, in their order, as far as they are remembered."""
        tokens: list[int] = []
        while len(tokens) < most and self._holds(place):
            slot = place % self._capacity
            tokens.append(self._token[slot])
            place = self._before[slot]
        return tokens[::-1]

    def after(self, place: int) -> int | None:
        """The next place of the same sequence."""
        after = self._after[place % self._capacity]
        return after if self._holds(after) else None

    def matches(self, place: int, most: int) -> Iterator[int]:
        """Other places that end in the same KEY_TOKENS tokens as `place`, the newest first, at most `most`."""
        found = self._same[place % self._capacity]
        while most and self._holds(found):
            yield found
            found = self._same[found % self._capacity]
            most -= 1

    def common_length(self, place: int, other: int, most: int) -> int:
        """Tokens, up to `most`, in which the sequences that end at the two places agree, counted from their ends."""
        token, before, capacity = self._token, self._before, self._capacity
        length = 0
        while length < most and self._holds(place) and self._holds(other):
            slot, other_slot = place % capacity, other % capacity
            if token[slot] != token[other_slot]:
                break
            length += 1
            place, other = before[slot], before[other_slot]
        return length

    def _holds(self, place: int) -> bool:
        return place >= 0 and place > self._end - 1 - self._capacity

    def _forget(self, slot: int) -> None:
        """What the slot held is about to be overwritten."""
        key = self._key[slot]
        if key != _NOWHERE and self._newest[key] == self._end - self._capacity:
            del self._newest[key]
