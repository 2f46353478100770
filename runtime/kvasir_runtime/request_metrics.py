"""What API processes count of their requests: rows of numbers that all of them share, so that whichever is scraped
shows the sum of all. Nothing is decided by what is counted here.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kvasir_runtime.requests.outputs import FinishReason
from kvasir_runtime.shared_rows import SharedRows

Keys = tuple[str, ...]
"""Values of a family's further labels."""
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
# Bounds as vLLM's dashboards know them, some to the letter; token times with finer ones for small models.
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_NUM_TOKENS = tuple(digit * 10.0**power for power in range(7) for digit in (1, 2, 5))
_HTTP = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
HTTP_METHODS = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/responses": "POST",
    "/v1/embeddings": "POST",
    "/v1/score": "POST",
    "/v1/rerank": "POST",
    "/classify": "POST",
    "/v1/models": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
}
"""By route; others are not counted: probes would hide clients."""
STATUS_CLASSES = ("2xx", "4xx", "5xx")


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram shows: a count per bucket, of which the last has no bound. No counts: nothing came yet."""

    bounds: Sequence[float]
    counts: Sequence[float]
    sum: float

    def cumulative(self) -> list[tuple[str, float]]:
        """Bounds are written as Python's floats, as dashboards quote them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts or [0] * len(names)), strict=True))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Where one histogram lies in a row: a count per bucket (the last is unbounded), then the sum."""

    start: int
    bounds: tuple[float, ...]
    sum_slot: int

    def read(self, rows: SharedRows) -> Distribution:
        """Of all rows."""
        counts = [rows.total(self.start + bucket) for bucket in range(len(self.bounds) + 1)]
        return Distribution(self.bounds, counts, rows.total(self.sum_slot))


def _in_a_row(start: int, *bounds: tuple[float, ...]) -> Iterator[Histogram]:
    for each in bounds:
        histogram = Histogram(start, each, sum_slot=start + len(each) + 1)
        yield histogram
        start = histogram.sum_slot + 1


# The layout of a row.
PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, FINISHED = range(4)
STATUSES = FINISHED + len(FINISH_REASONS)
"""Of each route the status classes."""
_HISTOGRAMS = STATUSES + len(HTTP_METHODS) * len(STATUS_CLASSES)
TTFT, ITL, TPOT, E2E, QUEUE, PREFILL, DECODE, PROMPT, COMPUTED, GENERATED, MOST_GENERATED, *HTTP = _in_a_row(
    _HISTOGRAMS, _FIRST_TOKEN, _TOKEN, _TOKEN, *[_REQUEST] * 4, *[_NUM_TOKENS] * 4, *[_HTTP] * len(HTTP_METHODS)
)
ROW_SLOTS = HTTP[-1].sum_slot + 1


def status_slot(route: int, status_class: str) -> int:
    return STATUSES + route * len(STATUS_CLASSES) + STATUS_CLASSES.index(status_class)


def request_rows(ipc_dir: Path, api_server_count: int) -> SharedRows:
    return SharedRows(ipc_dir / "request-metrics", api_server_count, ROW_SLOTS)


def finished(rows: SharedRows) -> dict[Keys, float]:
    """Sequences by the reason for their end."""
    return {(reason,): rows.total(FINISHED + offset) for offset, reason in enumerate(FINISH_REASONS)}


class RequestMetrics:
    """What one API process counts about its requests. One call costs about a microsecond."""

    def __init__(self, row: "memoryview[float]") -> None:
        self._row = row

    def began(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request, whatever the number of its sequences."""
        self._row[PROMPT_TOKENS] += num_prompt_tokens
        self._row[CACHED_TOKENS] += num_cached_tokens
        self._observe(PROMPT, num_prompt_tokens)
        self._observe(COMPUTED, num_prompt_tokens - num_cached_tokens)

    def prefilled(self, queue_seconds: float, prefill_seconds: float) -> None:
        self._observe(QUEUE, queue_seconds)
        self._observe(PREFILL, prefill_seconds)

    def first_tokens(self, num_tokens: int, seconds: float) -> None:
        """Of a sequence, `seconds` after its request's arrival."""
        self._row[GENERATION_TOKENS] += num_tokens
        self._observe(TTFT, seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """`seconds` after those before them."""
        self._row[GENERATION_TOKENS] += num_tokens
        self._observe(ITL, seconds)

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """A sequence, after `seconds` from its arrival."""
        self._row[FINISHED + FINISH_REASONS.index(reason)] += 1
        self._observe(E2E, seconds)

    def decoded(self, num_tokens: int, seconds: float) -> None:
        """A sequence of so many tokens, from the first one to the last."""
        self._observe(GENERATED, num_tokens)
        self._observe(DECODE, seconds)
        if num_tokens > 1:
            self._observe(TPOT, seconds / (num_tokens - 1))

    def most_generated(self, num_tokens: int) -> None:
        """By any sequence of a request that has ended."""
        self._observe(MOST_GENERATED, num_tokens)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """An HTTP request, to the last byte."""
        if path in HTTP_METHODS:
            route = list(HTTP_METHODS).index(path)
            self._row[status_slot(route, f"{status // 100}xx")] += 1
            self._observe(HTTP[route], seconds)

    def _observe(self, histogram: Histogram, value: float) -> None:
        self._row[histogram.start + bisect_left(histogram.bounds, value)] += 1
        self._row[histogram.sum_slot] += value
