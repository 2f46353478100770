"""A request inside the engine core: what is known of it, how far it is computed, and which blocks it holds.

`num_computed_tokens` chases `num_tokens_ahead`; prefill, chunked prefill, decode and resumption are that one rule. It
is advanced when a step is planned, so it counts tokens of steps under way as computed.
"""

from dataclasses import dataclass, field
from enum import Enum

from kvasir_runtime.engine.messages import AddRequest, SamplingParams, TokenLogprobs
from kvasir_runtime.kv_cache.block_table import BlockTable


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    api_index: int
    sampling: SamplingParams
    token_ids: list[int]
    """Prompt and sampled tokens."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and output together never exceed this."""
    arrival_time: float
    table: BlockTable
    priority: int = 0
    tenant: str = ""
    number: int = 0
    """Counts the scheduler's requests; settles the order of those that arrived at the same time."""

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    """Tokens being sampled in steps under way."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it, 0 where another engine counted."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Gathered over the prompt's chunks, sent with the first output."""
    has_sent_output: bool = False
    """Its first output, with the prompt's log-probabilities, is out; of a sequence begun elsewhere from the start."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens known, or known as soon as the steps under way end."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next step could compute; 0 when the last token allowed is sampled already."""
        if self.num_tokens_ahead >= self.max_total_tokens:
            return 0
        return self.num_tokens_ahead - self.num_computed_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Every prompt position must be computed, cached or not."""
        return self.sampling.prompt_logprobs is not None and not self.has_sent_output


def request_from(message: AddRequest, *, max_model_len: int, block_size: int) -> Request:
    num_prompt_tokens = len(message.prompt_token_ids)
    return Request(
        request_id=message.request_id,
        api_index=message.api_index,
        sampling=message.sampling,
        token_ids=[*message.prompt_token_ids, *message.output_token_ids],
        num_prompt_tokens=num_prompt_tokens,
        max_total_tokens=min(num_prompt_tokens + message.sampling.max_tokens, max_model_len),
        arrival_time=message.arrival_time,
        table=BlockTable(block_size, (message.cache_salt.encode(),) if message.cache_salt is not None else ()),
        priority=message.priority,
        tenant=message.tenant,
        num_cached_tokens=0 if message.output_token_ids else None,
        has_sent_output=bool(message.output_token_ids),
    )
