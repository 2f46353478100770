"""What an engine says of its load, published over ZMQ. The fields' order is that of the message."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int  # prompt tokens still to be computed of requests that have not started
    running_uncached_tokens: int  # the same of requests whose prefill has begun
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps_per_second: float
    prefill_tokens_per_second: float | None  # None until it has prefilled anything
    arrived: tuple[str, ...]  # x-request-ids received since the last report
    instance: str  # of the engine's process: another one has an empty cache
