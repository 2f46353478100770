"""A request as the engine core takes it.

It arrives fully resolved: token ids instead of text, real numbers instead of defaults, so the core never needs a
tokenizer or a request schema.
"""

import msgspec

from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.transfer.params import KvTransferParams


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A vector, made of what the model computes of the prompt's tokens. The request ends with it."""

    needs_whole_prompt: bool
    """Whether all tokens are to be computed, cached or not: the vector is made of more than the last."""
    second_text_start: int | None = None
    """Position of the first token of the second of two texts, which some models tell apart; None: there is one."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked for: made once by the API process, and carried as it is to the scheduler and the ranks."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    beam: BeamSearch | None = None
    """None: every sequence draws its tokens."""
    priority: int = 0
    """Lower is served earlier under the policy `priority`."""
    tenant: str = ""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    grammar: str | None = None
    """That outputs follow, as llguidance reads it; None: any text."""
    pooling: Pooling | None = None
    """None: the prompt is continued."""
    kv_transfer_params: KvTransferParams | None = None
    """Where the prompt's blocks come from, or whom they are kept for; None: neither."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def comes_whole(self) -> bool:
        """Whether outputs come at their end alone, so that a stream of them cannot be continued elsewhere."""
        return self.beam is not None

    def num_computed(self, num_wanted: int) -> int:
        """Sequences that are computed together for so many that are handed out."""
        return num_wanted if self.beam is None else self.beam.width

    @property
    def extra_keys(self) -> tuple[bytes, ...]:
        """What keeps its blocks apart from those of equal tokens."""
        return () if self.cache_salt is None else (self.cache_salt.encode(),)

    def with_sampling(self, sampling: SamplingParams) -> "RequestSpec":
        return msgspec.structs.replace(self, sampling=sampling)


class SequenceStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a request's sequences, where it begins here."""

    index: int
    """Among the request's sequences; outputs carry it."""
    seed: int
    """Of its draws; takes the place of the request's."""
    output_token_ids: list[int] = []
    """Generated already, by another engine; the sequence goes on after them as if it had been preempted."""


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    """Unique among all requests in flight of all API processes."""
    api_index: int
    """Which API process the outputs go to."""
    spec: RequestSpec
    sequences: list[SequenceStart]
    """At least one. They share the prompt's KV blocks and differ in their seeds; `spec.sampling.seed` is not read."""
    arrival_time: float
    """Seconds since the epoch."""
    http_request_id: str | None = None
    """The `x-request-id` that brought it; told once, by the first of the requests that one HTTP request becomes."""
