"""What an engine's transfers come to, since its start. Series: kvasir_runtime/metrics.py."""

from bisect import bisect_left
from collections import Counter

import msgspec

from kvasir_runtime.transfer.commands import EndOfOffer, FailureReason

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters only grow."""

    num_blocks_sent: int = 0
    num_blocks_received: int = 0
    page_bytes: int = 0
    """Of each."""
    seconds_counts: list[int] = []
    """Transfers by duration: one bucket a bound, and one beyond the last."""
    seconds_sum: float = 0.0
    num_failures: dict[str, int] = {}
    """By reason."""
    num_offers_ended: dict[str, int] = {}
    """By reason."""
    num_leased_blocks: int = 0
    """Kept for others now."""
    num_requests_kept: int = 0
    """That went on in another engine, so far."""


class TransferCounts:
    """Kept by the agent; read by the core as a whole (`stats`)."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.bytes_per_second: float | None = None
        """Of reads; None before the first."""
        self._num_sent = 0
        self._num_received = 0
        self._seconds_counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._seconds_sum = 0.0
        self._failures: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def sent(self, num_blocks: int) -> None:
        self._num_sent += num_blocks

    def received(self, num_blocks: int) -> None:
        self._num_received += num_blocks

    def read(self, num_blocks: int, seconds: float) -> None:
        """So many blocks came in one read. The rate follows the last few."""
        rate = num_blocks * self._page_bytes / max(seconds, 1e-6)
        self.bytes_per_second = rate if self.bytes_per_second is None else (self.bytes_per_second + rate) / 2

    def took(self, seconds: float) -> None:
        """One pull, from asking to the last byte."""
        self._seconds_counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self._seconds_sum += seconds

    def failed(self, reason: FailureReason) -> None:
        if reason != "cancelled":
            self._failures[reason] += 1

    def offer_ended(self, reason: EndOfOffer) -> None:
        self._ended[reason] += 1

    def stats(self, num_leased_blocks: int) -> TransferStats:
        return TransferStats(
            num_blocks_sent=self._num_sent,
            num_blocks_received=self._num_received,
            page_bytes=self._page_bytes,
            seconds_counts=list(self._seconds_counts),
            seconds_sum=self._seconds_sum,
            num_failures=dict(self._failures),
            num_offers_ended=dict(self._ended),
            num_leased_blocks=num_leased_blocks,
        )
