"""What clients may send: one pydantic model per route, the only place where untrusted JSON becomes typed values.

Fields carry OpenAI's and vLLM's names and meanings. What becomes of keys without a field, `body` says. `None`
always means: not given.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, PydanticUseDefault

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.requests.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, EarlyStopping
from kvasir_runtime.server.body import NOTHING, WISHES, Body, LenientBody, RequestModel, Unsupported
from kvasir_runtime.server.token_rules import TokenId, TokenRuleFields
from kvasir_runtime.server.tools import OfferedTools, ToolFields

INT64 = 2**63
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
"""Of each. With every token all are looked for: 32 of them, as long as this, take 0.04 ms, at worst 0.5 ms."""
MAX_MESSAGES = 16384
MAX_TEMPERATURE = 1e30
"""OpenAI takes at most 2, vLLM anything; this one leaves logits in float32 as far apart as one can tell."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions."""


def _whole(value: Any) -> Any:
    """JSON knows one kind of number, and some clients write every one with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _default_for_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


OrNull = BeforeValidator(_default_for_null)
"""For a field whose default is a value: null means not given, as with every other field."""
Flag = Annotated[bool, OrNull]
Whole = Annotated[int, BeforeValidator(_whole)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)]
Key = Annotated[str, Field(min_length=1, max_length=256)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[Whole, Field(ge=-1)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]


class StreamOptions(RequestModel):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class KvTransferFields(BaseModel):
    """`kv_transfer_params`. Routers pass on what other engines answered, so keys without meaning here are let pass."""

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: Key | None = None
    remote_block_ids: list[Any] | None = None
    remote_host: Key | None = None
    remote_port: Annotated[int, Field(ge=1, lt=65536)] | None = None
    tp_size: int | None = None
    dcp_size: int | None = None
    pp_size: int | None = None
    remote_num_tokens: int | None = None
    transfer_mode: str | None = None
    transfer_id: Key | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        asks = self.remote_host is not None and self.remote_port is not None
        if self.do_remote_prefill and not asks:
            raise PydanticCustomError(
                "kv_transfer_params", "kv_transfer_params: do_remote_prefill needs remote_host and remote_port"
            )
        return self


class GenerationFields(TokenRuleFields):
    """What both ways of asking for text have in common."""

    model: str | None = None
    request_id: Key | None = None
    """Of the client; the answer's id ends with it."""
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=0)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0), OrNull] = 0
    n: Annotated[Whole, Field(ge=1)] | None = None
    best_of: Annotated[Whole, Field(ge=1)] | None = None
    use_beam_search: Flag = False
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: EarlyStopping | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[Whole, Field(ge=-INT64, lt=2 * INT64)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1)] | None = None
    """The last tokens of a prompt that are read; -1: as many as there is room for."""
    priority: Annotated[Whole, Field(ge=-INT64, lt=INT64), OrNull] = 0
    cache_salt: Key | None = None
    kv_transfer_params: KvTransferFields | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed with stream: true")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens and not self._is_prefill_leg:
            raise PydanticCustomError(
                "min_tokens",
                "min_tokens is {min_tokens}, more than max_tokens, which is {max_tokens}",
                {"min_tokens": self.min_tokens, "max_tokens": self.max_tokens},
            )
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs is only answered whole, with stream: false")
        self._check_best_of()
        self._check_beam_search()
        return self

    @property
    def _is_prefill_leg(self) -> bool:
        """Another engine answers, so llm-d's sidecar asks for one token and leaves the client's least number in."""
        return self.kv_transfer_params is not None and bool(self.kv_transfer_params.do_remote_decode)

    def _check_best_of(self) -> None:
        if self.num_candidates < self.num_returned:
            raise PydanticCustomError(
                "best_of",
                "best_of is {best_of}, fewer than n, which is {n}",
                {"best_of": self.best_of, "n": self.num_returned},
            )
        if self.stream and self.num_sequences > self.num_returned:
            raise PydanticCustomError(
                "best_of", "best_of must equal n with stream: true: which are the best is known when all are complete"
            )

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            for field, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, field) not in (None, default):
                    raise PydanticCustomError(
                        field, "{field} is only allowed with use_beam_search: true", {"field": field}
                    )
        elif self.stop is not None:
            raise PydanticCustomError(
                "stop", "stop cannot be used with use_beam_search: hypotheses end at token ids only, see stop_token_ids"
            )
        elif self.num_logprobs is not None:
            raise PydanticCustomError(
                "logprobs", "logprobs cannot be used with use_beam_search: a hypothesis is ranked by their sum alone"
            )
        elif self.wanted_grammar() is not None:
            raise PydanticCustomError(
                "use_beam_search", "use_beam_search cannot be used with a grammar: beams are not held to one"
            )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token generated; None: nothing. Each route has a field of its own for it."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same with the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def num_returned(self) -> int:
        """Sequences a prompt in the answer."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Sequences a prompt among which the returned are the best; of a beam search its width."""
        return self.num_returned if self.best_of is None else self.best_of

    @property
    def num_sequences(self) -> int:
        """Sequences a prompt that the engine hands out; it ranks a beam's itself."""
        return self.num_returned if self.use_beam_search else self.num_candidates

    @property
    def token_limit(self) -> int | None:
        """Of a sequence; None: not given. `max_completion_tokens` is the newer name, and both may be sent."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        """Its name."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def max_new_tokens(self) -> int | None:
        """Of a sequence that the engine is to make; None: what the context has room for."""
        return self.token_limit

    @property
    def is_cut_to_context(self) -> bool:
        """A bound on tokens beyond what the context has room for is no error."""
        return False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Any = None
    """A string, a list of strings, a list of token ids, or a list of those."""
    echo: bool | None = None
    logprobs: Annotated[Whole, BeforeValidator(_as_number), Field(ge=0)] | None = None
    """True is 1, as vLLM has it."""
    add_special_tokens: Flag = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((most for most in (echoed, self.prompt_logprobs) if most is not None), default=None)

    @property
    def is_echo_only(self) -> bool:
        """Nothing but the prompt's own log probabilities is asked for; evaluation harnesses do that."""
        return bool(self.echo) and self.token_limit == 0

    @property
    def max_new_tokens(self) -> int | None:
        if self.is_echo_only:
            return 1  # made and dropped: the engine always makes a token
        if self.token_limit is None and "max_tokens" not in self.model_fields_set:
            return DEFAULT_MAX_TOKENS
        return self.token_limit


def _refuse_other_media(value: str) -> str:
    if value == "text":
        return value
    raise PydanticCustomError("unsupported", "this server supports only content parts of type 'text'")


class ContentPart(RequestModel):
    type: Annotated[str, AfterValidator(_refuse_other_media)]
    text: str


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Unsupported = None
    prefix: Unsupported = None
    partial: Unsupported = None


class ChatPrompt(OfferedTools):
    """How messages become a prompt; shared by chat completions and /tokenize."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Reaches the template; `none` switches thinking off where it knows a switch, any other on."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        return self


class ChatCompletionRequest(ChatPrompt, ToolFields, GenerationFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    include_reasoning: Flag = True
    """False: what the model thinks is left out of the answer."""
    thinking_token_budget: Annotated[Whole, Field(ge=0)] | None = None
    """After so many tokens a thought is ended."""
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_answer(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        if self.tool_choice is not None:
            self.check_choice()
        if self.use_beam_search and self.call_rule is not None:
            raise PydanticCustomError(
                "use_beam_search", "use_beam_search cannot be used with tools; leave them out or set tool_choice: none"
            )
        return self


_CHATS_WORDS = frozenset({"max_completion_tokens", "modalities", "stream_options"})
"""Other APIs have their own for it."""
_UNTOLD = frozenset(
    {"logprobs", "n", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)
"""What answers that are one sequence of text have no place for."""


def chats_fields(body: LenientBody, translated: Mapping[str, Any]) -> dict[str, Any]:
    """Of a request of another API: what its own fields come to, where not None, and every field of chat that the API
    has no name for, which means there what it means in chat, as do wishes that chat refuses. Raises InvalidRequestError
    for those that its answers have no place for.
    """
    known = ChatCompletionRequest.model_fields.keys() | WISHES.keys()
    given = {name: value for name in known if (value := body.extra(name)) is not None}
    for name in sorted(_UNTOLD & given.keys()):
        if given[name] not in NOTHING and (name, given[name]) != ("n", 1):
            raise InvalidRequestError(f"{name}: an answer of this API is one text, with no place for it", name)
    return {name: value for name, value in given.items() if name not in _CHATS_WORDS | _UNTOLD} | {
        name: value for name, value in translated.items() if value is not None
    }


class TokenizeTextRequest(Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatPrompt):
    """POST /tokenize with messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
