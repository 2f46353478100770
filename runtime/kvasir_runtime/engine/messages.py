"""What API processes and the engine core say to each other, as msgspec structs over ZMQ (msgpack).

Requests arrive fully resolved: token ids instead of text, real numbers instead of defaults, so the core never needs a
tokenizer or a request schema. Outputs are batched: one `StepOutputs` per step and API process.
"""

from typing import Literal

import msgspec

from kvasir_runtime.transfer.metrics import TransferStats
from kvasir_runtime.transfer.params import KvTransferParams

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is continued. All values are validated by the API process."""

    max_tokens: int
    seed: int
    """Seed of the counter-based generator (64 bit, unsigned); the API process draws one when the client gave none."""
    min_tokens: int = 0
    """No stop token is sampled before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """How many most likely alternatives to report with each output token; 0: only the token's own; None: nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Every token id that ends the sequence (end-of-sequence ids are in here unless the client ignores them)."""


class SequenceStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a request's sequences, where it begins here."""

    index: int
    """Among the request's sequences; outputs carry it."""
    seed: int
    """Of its draws; takes the place of the request's."""
    output_token_ids: list[int] = []
    """Generated already, by another engine; the sequence goes on after them as if it had been preempted."""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search as Hugging Face defines it: the request's sequences are its best hypotheses, best first."""

    width: int
    length_penalty: float = 1.0
    """Exponent of the length by which a hypothesis' summed log-probability is divided."""
    early_stopping: bool = False
    """End as soon as `width` hypotheses are complete."""


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    """Unique among all requests in flight of all API processes."""
    api_index: int
    """Which API process the outputs go to."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sequences: list[SequenceStart]
    """At least one. They share the prompt's KV blocks and differ in their seeds; `sampling.seed` is not read."""
    arrival_time: float
    """Seconds since the epoch."""
    priority: int = 0
    """Lower is served earlier under the policy `priority`."""
    tenant: str = ""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    http_request_id: str | None = None
    """The `x-request-id` that brought it; told once, by the first of the requests that one HTTP request becomes."""
    beam: BeamSearch | None = None
    """None: every sequence draws its tokens."""
    kv_transfer_params: KvTransferParams | None = None
    """Where the prompt's blocks come from, or whom they are kept for; None: neither."""


class Abort(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    index: int | None = None
    """One sequence; None: all that are left of the request."""
    is_kept: bool = False
    """It goes on in another engine: what is written of it is kept for that one, under the request's id."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    aborts: list[Abort]


class MoveRequests(msgspec.Struct, frozen=True, tag=True):
    """Have every API process end those that can go on in another engine."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Something has happened beside the channel, in the core's own process; from nobody else."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: the chosen token first, then the most likely ones in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Of the chosen token, counted from 1."""


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one sequence, when it is more than tokens (`PlainTokens`)."""

    request_id: str
    index: int = 0
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token (the first is None), sent once, with or before the first new token."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token id that ended the sequence, if one did; it is the last of `new_token_ids`."""
    error: str | None = None
    """Says why, with finish_reason `error`."""
    kv_transfer_params: KvTransferParams | None = None
    """With the end of a request whose blocks are kept: what the engine that wants them is to be asked with."""


class PlainTokens(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of sequences that go on and have nothing else to tell: most of all outputs, so told in columns, which
    cost a step of hundreds of sequences less than a struct for each."""

    request_ids: list[str]
    indices: list[int]
    num_tokens: list[int]
    """How many of `token_ids`, in order, belong to each sequence."""
    token_ids: list[int]


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
    num_kv_events: int = 0
    """Published since the start."""
    transfers: TransferStats | None = None
    """None: no KV is exchanged with other engines."""


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    outputs: list[SequenceOutput]
    stats: SchedulerStats
    plain: PlainTokens | None = None


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    max_model_len: int
    max_num_seqs: int
    """Rows: a beam search may be no wider."""
    vocab_size: int
    num_blocks: int
    block_size: int
    device: str
    attention_backend: str
    startup_seconds: dict[str, float]
    """Phase -> seconds: load_weights, measure_linear, allocate_kv, warm_up, ..."""
    kv_capacity_tokens: int = 0
    """That fit into all blocks."""
    instance: str = ""
    """Random, of this engine core alone: another one holds nothing of what this one had cached."""


class RequestsMove(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every API process: end those that can go on in another engine."""

    host: str
    """Where that one is to ask for their blocks."""
    port: int


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last word of an engine core that cannot go on."""

    error: str


ToCore = AddRequest | AbortRequests | MoveRequests | Wake
FromCore = StepOutputs | EngineReady | RequestsMove | EngineFailed
