"""What clients get: msgspec structs in OpenAI's shapes, with vLLM's additions where they were asked for.

A field that is UNSET is left out of the JSON; one that is None is sent as null, as OpenAI does.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvasir_runtime.transfer.params import KvTransferParams

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    return _encoder.encode(value)


def to_part(value: Any) -> msgspec.Raw:
    """JSON of a part of an answer: nothing else runs while one value is encoded, and an answer may be long."""
    return msgspec.Raw(_encoder.encode(value))


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, frozen=True):
    error: AnthropicErrorBody
    type: str = "error"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    """By their share of the text."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """As vLLM shapes it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Of each token of a prompt, by token id: its own first, then the most likely; the prompt's first has none."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same: clients look for one or the other."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[msgspec.Raw]
    """Of each a `ChatChoice`."""
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first of a call brings all but its arguments, and no other does: clients join the strings of all."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """Of a whole answer and of a chunk alike."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[msgspec.Raw]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "kvasir"
    parent: None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerResponse(msgspec.Struct):
    tokenizer: str
    """The text of a tokenizer.json, with what tokenizer_config.json overrules."""
    chat_template: str | None
    special_tokens: dict[str, str]
    digest: str
    """Of the rest, sha256 in hex."""


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class DrainResponse(msgspec.Struct):
    draining: bool
    in_flight_requests: int
    leased_blocks: int


class LoadResponse(msgspec.Struct):
    """What a load report says (engine/load_report.py), for those who ask; of an engine that is not ready, nothing."""

    server_load: int
    """Requests being answered by all API processes (vLLM's name)."""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    waiting_uncached_tokens: int = 0
    running_uncached_tokens: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    steps_per_second: float = 0.0
    prefill_tokens_per_second: float | None = None
    instance: str | None = None
    max_model_len: int | None = None
    max_model_len_cut_from: int | None = None
    """Tokens of context that the model has, where the KV cache holds no request so long; None: nothing was cut."""


class SleepState(msgspec.Struct):
    is_sleeping: bool
    level: int | None
    """None: it is awake."""


class VersionResponse(msgspec.Struct):
    version: str
