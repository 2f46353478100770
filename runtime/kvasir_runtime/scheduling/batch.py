"""What the scheduler hands to the executor for one step, and what comes back.

Ranks keep the state of every request that they have seen (tokens, block table, sampling state); a batch holds only what
changed. Plain data: no torch here.
"""

from dataclasses import dataclass, field

from kvasir_runtime.engine.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the rank has not seen, or has forgotten since (preempted and resumed)."""

    request_id: str
    token_ids: list[int]
    """Everything known: the prompt, and the tokens sampled before a preemption."""
    num_prompt_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of the step: tokens `[num_computed_tokens, num_computed_tokens + num_new_tokens)`."""

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[int, ...]
    """Appended to the rank's block table before the step."""
    samples: bool
    """The share ends at the last known token, so a token is drawn after it."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Ranks apply it in field order: forget, add, then compute."""

    released_request_ids: tuple[str, ...]
    """Finished, aborted or preempted since the last batch: their rows are free."""
    new_requests: tuple[NewRequest, ...]
    requests: tuple[ScheduledRequest, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Results of one step, aligned with those of the batch's requests that have `samples` set, in their order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """One per sampled token; None where the request did not ask."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Request id -> one entry for each prompt token scored in this step (prompt tokens 1.. in order over the steps)."""
