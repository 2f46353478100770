"""One engine core as an API process sees it: its channel, what it said of itself last, and what it was sent.

With data parallelism there are several, each with a copy of the weights and a KV cache of its own.
"""

from dataclasses import dataclass, field

from kvasir_runtime.engine.active_request import ActiveRequest
from kvasir_runtime.engine.channel import EngineChannel
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.requests.stats import SchedulerStats


@dataclass(slots=True)
class CoreClient:
    channel: EngineChannel
    last_progress: float
    """When it finished a step, or was given work after it had none: seconds of the engine's clock."""
    ready: EngineReady | None = None
    stats: SchedulerStats | None = None
    requests: dict[str, ActiveRequest] = field(default_factory=dict)
    """Of this process, that have not ended."""
    prefill_tokens: int = 0
    """Of those of which no token has come: prompt tokens that are not expected to be cached."""

    @property
    def has_work(self) -> bool:
        """Of this process, that waits for steps and not for other engines alone: more than the core holds for those."""
        stats = self.stats
        if stats is None or stats.num_running or stats.num_waiting:
            return bool(self.requests)
        return len(self.requests) > stats.num_held

    def add(self, request_id: str, request: ActiveRequest) -> None:
        if not self.has_work:
            self.last_progress = request.arrival  # the core had nothing to make progress with
        self.requests[request_id] = request
        self.prefill_tokens += request.prefill_tokens

    def take_begun(self, request: ActiveRequest) -> None:
        """Its prompt is computed, or nobody waits for it any more."""
        self.prefill_tokens -= request.prefill_tokens
        request.prefill_tokens = 0

    def remove(self, request_id: str) -> ActiveRequest | None:
        """None where it has ended already."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.take_begun(request)
        return request

    def clear(self) -> None:
        self.requests.clear()
        self.prefill_tokens = 0
