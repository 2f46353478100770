"""What admission must know of a request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# However short its prompt, a request occupies its engine to decode as well.
_MIN_COST_TOKENS = 256


class Waiting(NamedTuple):
    """How long a request has waited, and the work that its response ratio counts."""

    seconds: float
    work: float


def _nothing() -> float:
    return 0.0


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One object for all its attempts."""

    model: str | None  # as engines know it; None: any will do
    tenant: str
    num_tokens: int  # of its prompt
    priority: int = 0  # as vLLM's: lower is earlier
    deadline_seconds: float | None = None  # its client's own limit to the time in the queue
    estimate: Callable[[], float] = _nothing  # what of its prefill is left for an engine to do, by what is cached now
    has_begun: bool = False  # its client has a part of the answer
    number: int = 0  # of its arrival, given by the queue
    arrived: float = 0.0  # by the queue's clock, its waiting before a retry included
    work: float = 0.0  # by the last estimate

    @property
    def cost_tokens(self) -> int:
        return max(self.num_tokens, _MIN_COST_TOKENS)

    @property
    def uncached_tokens(self) -> float:
        """Of its prompt, by the last estimate: work is that or more, by what attention adds behind a long prefix."""
        return min(self.work, self.num_tokens)

    @property
    def counted_work(self) -> float:
        """In its ratio. Streams that have begun are equal."""
        return _MIN_COST_TOKENS if self.has_begun else max(self.work, _MIN_COST_TOKENS)

    def response_ratio(self, now: float) -> float:
        """Streams that have begun are equal."""
        return 0.0 if self.has_begun else (now - self.arrived) / self.counted_work

    @property
    def rank(self) -> int:
        """Nothing but arrival counts among streams that have begun."""
        return 0 if self.has_begun else self.priority
