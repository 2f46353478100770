"""A rate limit that lets short bursts pass: a bucket that fills steadily and that requests empty. Reads no clock."""

# Of a token: what rounding may leave missing once the time that `take` has named is over.
_NOTHING = 1e-6


class TokenBucket:
    """Full at first, with a minute's tokens."""

    def __init__(self, tokens_per_minute: int, now: float) -> None:
        self._capacity = tokens_per_minute
        self._tokens_per_second = tokens_per_minute / 60
        self._level = float(tokens_per_minute)  # below zero after a request larger than the bucket
        self._filled_at = now

    def take(self, num_tokens: int, now: float) -> float:
        """0.0 where they are taken; else the seconds until they can be, and nothing is taken.

        More than a full bucket holds is taken from a full one, which then fills from below zero: the rate holds.
        """
        self._fill(now)
        missing = min(num_tokens, self._capacity) - self._level
        if missing > _NOTHING:
            return missing / self._tokens_per_second
        self._level -= num_tokens
        return 0.0

    def give_back(self, num_tokens: int) -> None:
        self._level += num_tokens

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._filled_at) * self._tokens_per_second, self._capacity)
        self._filled_at = now
