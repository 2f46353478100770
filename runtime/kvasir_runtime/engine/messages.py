"""What API processes and the engine core say to each other, as msgspec structs over ZMQ (msgpack).

Requests and outputs themselves are those of `requests/`, which the layers below share. Outputs are batched: one
`StepOutputs` per step and API process.
"""

import msgspec

from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import PlainTokens, SequenceOutput
from kvasir_runtime.requests.stats import SchedulerStats


class Abort(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    index: int | None = None
    """One sequence; None: all that are left of the request."""
    is_kept: bool = False
    """It goes on in another engine: what is written of it is kept for that one, under the request's id."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    aborts: list[Abort]


class MoveRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have every API process end those that can go on in another engine."""

    http_request_id: str | None = None
    """Only those that came with it; None: all."""


class EndRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have whichever API process has these end them where they are."""

    names: list[str]
    """Of answers, or those that requests came with over HTTP."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Let nothing that is cached now be found again."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End all requests and give memory back (`sleeping`)."""

    level: int


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Take the memory again. `EngineReady` follows."""


class ApiGone(msgspec.Struct, frozen=True, tag=True):
    """From the parent of the API processes: one of them has died, and with it whoever waited for its requests."""

    api_index: int


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Something has happened beside the channel, in the core's own process; from nobody else."""


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    outputs: list[SequenceOutput]
    stats: SchedulerStats
    plain: PlainTokens | None = None


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    max_model_len: int
    max_model_len_cut_from: int | None = None
    """What it would be with more memory for the KV cache; None: it was not cut."""
    max_num_seqs: int
    """Rows: sequences of one request that must run together may be no more."""
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
    http_request_id: str | None = None
    """As in MoveRequests."""


class RequestsEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every API process: end those that have these names."""

    names: list[str]


class Asleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every API process: what was under way is dropped, and so is what comes, until the next `EngineReady`."""

    level: int


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last word of an engine core that cannot go on."""

    error: str


ToCore = AddRequest | AbortRequests | MoveRequests | EndRequests | ResetPrefixCache | Sleep | WakeUp | ApiGone | Wake
FromCore = StepOutputs | EngineReady | RequestsMove | RequestsEnd | Asleep | EngineFailed
