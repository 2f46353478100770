"""What the engine core counts."""

import msgspec

from kvasir_runtime.transfer.metrics import TransferStats

STEP_TOKENS_BOUNDS = (1, *(2**power for power in range(3, 15)))
"""Of the histogram of a step's tokens, as vLLM's."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """State after a step; counters only grow."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    num_prefix_queries: int
    """Tokens looked up in the prefix cache."""
    num_prefix_hits: int
    """Tokens found there."""
    last_step_time: float
    """Seconds since the epoch."""
    num_held: int = 0
    """Requests that wait for something else than their turn."""
    num_drafts: int = 0
    """Times that drafts of a sequence were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that held."""
    num_accepted_per_position: list[int] = []
    """How often the first, second, ... draft token held."""
    waiting_uncached_tokens: int = 0
    """Known tokens still to be computed of what waits: those that are neither cached nor under way for another."""
    running_uncached_tokens: int = 0
    """The same of prompts that are partly computed, what steps under way compute included."""
    kv_used_tokens: int = 0
    """That the blocks in use have room for."""
    kv_capacity_tokens: int = 0
    steps_per_second: float = 0.0
    """While there is work, over the last seconds of it."""
    prefill_tokens_per_second: float | None = None
    """Prompt tokens computed, in steps with many of them; None before the first."""
    step_tokens_counts: list[int] = []
    """Steps by their tokens: one bucket a bound, and one beyond the last."""
    step_tokens_sum: int = 0
    num_kv_events: int = 0
    """Published since the start."""
    transfers: TransferStats | None = None
    """None: no KV is exchanged with other engines."""
