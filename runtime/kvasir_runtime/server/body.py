"""A request's body: how it is read, no more and no longer than the server is willing to, and how it becomes a model.

Clients of other servers send fields that are not ours: hints, which change nothing here, and wishes that only others
grant. A hint is accepted with any value, wherever it stands, and named in the log the first time it comes. A wish is
accepted with the value that asks for nothing, and refused by name with any other. pydantic's findings become one
sentence that a client can act on.
"""

import asyncio
import difflib
import json
import logging
import re
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import Request

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.flags import NEAR
from kvasir_runtime.server.errors import BodyTimeoutError, BodyTooLargeError

logger = logging.getLogger(__name__)
MAX_SHOWN_INPUT = 80  # characters of a wrong value that an error repeats
MAX_LISTED_ERRORS = 1000
"""Describing one takes some 15 us, and nothing else runs meanwhile."""
MAX_NAMED_HINTS = 1024
"""After so many, the log gives only names that are known, since clients choose the others."""
_named_hints: set[str] = set()

_OPENAI = frozenset({
    "include_obfuscation", "metadata", "moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "user_id",
    "verbosity",
})  # fmt: skip
_REASONING = frozenset({
    "chat_template_content_format", "enable_thinking", "include_reasoning", "reasoning", "reasoning_budget",
    "reasoning_format", "reasoning_split", "separate_reasoning", "stream_reasoning", "think", "thinking",
    "thinking_budget", "thinking_token_budget",
})  # fmt: skip
_MESSAGES = frozenset({
    "additional_kwargs", "annotations", "audio", "cache_control", "citations", "created_at", "encrypted_content",
    "extra_content", "id", "parsed", "phase", "provider_metadata", "provider_options", "provider_specific_fields",
    "reasoning_details", "reasoning_signature", "refusal", "response_metadata", "signature", "status",
    "thinking_blocks", "thinking_signature", "timestamp",
})  # fmt: skip
"""Of those that a client got from another server, or from this one, and sends back."""
_GATEWAYS = frozenset({
    "allowed_openai_params", "cache", "caching", "debug", "drop_params", "fallbacks", "litellm_call_id",
    "litellm_metadata", "litellm_session_id", "litellm_trace_id", "models", "num_retries", "provider", "route",
    "session_id", "tags", "timeout", "trace", "trace_id", "transforms", "usage",
})  # fmt: skip
_ENGINES = frozenset({
    "cache_prompt", "custom_labels", "data_parallel_rank", "detokenize", "disagg_prefill_dp_rank", "extra_key",
    "guided_decoding_backend", "guided_whitespace_pattern", "id_slot", "images_config", "keep_alive",
    "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "mm_processor_kwargs", "n_discard", "n_keep",
    "ngram_corpus_id", "return_mm_kwargs", "return_token_offsets", "rid", "routed_dp_rank",
    "routed_experts_prompt_start", "routed_experts_start_len", "slot_id", "spaces_between_special_tokens",
    "stream_interval", "use_audio_in_video",
})  # fmt: skip
MAX_NAME_CHARS = 64  # of a key that the log names
HINTS = _OPENAI | _REASONING | _MESSAGES | _GATEWAYS | _ENGINES
UNSUPPORTED = "this server does not support it; leave it out"
_OLD_NAMES = {
    "functions": "this server does not know this older name; send tools",
    "function_call": "this server does not know this older name; send tool_choice",
}
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
WISHES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            # OpenAI
            "audio", "plugins", "prediction", "suffix", "tools",
            # vLLM
            "allowed_token_ids", "bad_words", "chat_template", "echo", "ec_transfer_params", 
            "logits_processors", "logprob_token_ids", "prompt_embeds",
            "prompt_logprobs", "repetition_detection", "return_prompt_text",
            "truncate_prompt_tokens", "vllm_xargs", "watermarking",
            # SGLang
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "custom_params",
            "input_ids", "lora_path", "no_stop_trim", "return_cached_tokens_details",
            "return_hidden_states", "return_meta_info", "return_prompt_token_ids", "return_routed_experts",
            "session_params", "stop_regex", "task",
            # llama.cpp
            "dry_multiplier", "dynatemp_range", "grammar", "min_keep", "mirostat", "n_probs", "post_sampling_probs",
            "return_progress", "samplers", "t_max_predict_ms", "timings_per_token", "top_a", "top_n_sigma",
            "xtc_probability",
        ),
        NOTHING,
    ),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typical_p"), (None, 1)),
    **dict.fromkeys(_OLD_NAMES, NOTHING),
    "truncation_side": (None, "left"),
    "web_search_options": (None,),
}  # fmt: skip
"""At the top of a body. With the values that ask for nothing."""


def _hint(name: str, info: ValidationInfo) -> str:
    """`info.context`: a set that takes those that came."""
    if name not in HINTS:
        raise PydanticCustomError("extra_forbidden", "unknown")
    if isinstance(info.context, set):
        info.context.add(name)
    return name


def _hint_or_wish(name: str, info: ValidationInfo) -> str:
    return name if name in WISHES else _hint(name, info)


class RequestModel(BaseModel):
    """An object within a body; a key that is neither a field nor a hint is an error."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[Annotated[str, AfterValidator(_hint)], Any] = Field(init=False)


class Body(RequestModel):
    __pydantic_extra__: dict[Annotated[str, AfterValidator(_hint_or_wish)], Any] = Field(init=False)

    def check_wishes(self) -> None:
        """Raises InvalidRequestError for one that is not granted here."""
        for name, value in (self.model_extra or {}).items():
            if name in WISHES and value not in WISHES[name]:
                raise InvalidRequestError(f"{name}: {_OLD_NAMES.get(name, UNSUPPORTED)}", name)


def _taken(name: str, info: ValidationInfo) -> str:
    if isinstance(info.context, set):
        info.context.add(name[:MAX_NAME_CHARS])
    return name


class LenientBody(Body):
    """Of an API whose clients send new fields with each of their releases: what is not known is taken as a hint."""

    __pydantic_extra__: dict[Annotated[str, AfterValidator(_taken)], Any] = Field(init=False)

    def extra(self, name: str) -> Any:
        """Of a key without a field; None: it was not sent."""
        return (self.model_extra or {}).get(name)


def _refuse_unless_empty(value: Any) -> Any:
    if value in NOTHING:
        return None
    raise PydanticCustomError("unsupported", UNSUPPORTED)


Unsupported = Annotated[Any, AfterValidator(_refuse_unless_empty)]
"""A wish within a message."""


Model = TypeVar("Model", bound=Body)
Names = TypeVar("Names", bound=msgspec.Struct)


async def read_body(request: Request, max_bytes: int, max_seconds: float) -> bytes:
    """Raises BodyTooLargeError, BodyTimeoutError, and ClientDisconnect when the client leaves before its end."""
    try:
        async with asyncio.timeout(max_seconds):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeoutError(f"the body has not come within {max_seconds:g} seconds; send it faster") from None


async def read_names(request: Request, names: type[Names], form: str, max_bytes: int, max_seconds: float) -> Names:
    """Of a body that only names requests; `form`: how it looks. Raises InvalidRequestError, and as `read_body`."""
    try:
        return msgspec.json.decode(await read_body(request, max_bytes, max_seconds), type=names)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body must be {form}: {error}") from error


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(declared, max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(f"more than {num_bytes - 1}", max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(seen: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {seen} bytes, but this server reads at most {max_bytes} (--max-body-bytes); send less"
    )


def parse(model: type[Model], body: bytes) -> Model:
    """Raises InvalidRequestError that names the field, what was seen and what is expected."""
    hints: set[str] = set()
    try:
        wishes = model.model_validate_json(body, context=hints)
    except ValidationError as error:
        raise _invalid(model, error, body) from error
    wishes.check_wishes()
    _name_once(hints)
    return wishes


def checked(model: type[Model], values: dict[str, Any]) -> Model:
    """What another API's request comes to, in the words of this one. Raises InvalidRequestError as `parse`."""
    try:
        wishes = model.model_validate(values)
    except ValidationError as error:
        raise _invalid(model, error) from error
    wishes.check_wishes()
    return wishes


def _invalid(model: type[Body], error: ValidationError, body: bytes = b"") -> InvalidRequestError:
    if error.error_count() > MAX_LISTED_ERRORS:
        return InvalidRequestError(
            f"{error.error_count()} fields of the request are unknown or wrong, too many to name one; "
            "send only fields that this route has"
        )
    details = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":
        return _malformed_body(body, details[0])
    return _invalid_field(model, details)


def _name_once(hints: set[str]) -> None:
    new = hints - _named_hints
    if len(_named_hints) > MAX_NAMED_HINTS:
        new &= HINTS
    if new:
        _named_hints.update(new)
        logger.info("clients send fields that mean nothing here: %s", ", ".join(sorted(new)))


def _malformed_body(body: bytes, detail: ErrorDetails) -> InvalidRequestError:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequestError(
            f"the body is not valid UTF-8: byte 0x{body[error.start]:02x} at position {error.start} ({error.reason}); "
            "send JSON encoded as UTF-8"
        )
    return InvalidRequestError(f"the body is not valid JSON: {detail['ctx']['error']}; send one JSON object")


def _invalid_field(model: type[Body], details: list[ErrorDetails]) -> InvalidRequestError:
    """Of several errors the one that helps most: a thing we cannot do, an unknown key, the innermost wrong value."""
    unsupported = [detail for detail in details if detail["type"] == "unsupported"]
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    if unknown and not unsupported:
        return _unknown_fields(model, unknown)
    first = unsupported[0] if unsupported else max(details, key=lambda detail: _field_name(detail["loc"]).count("["))
    field = _field_name(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{field} is required, but it was not given", field)
    if not field:
        return InvalidRequestError(first["msg"], first["type"] if first["type"] in model.model_fields else None)
    if unsupported:
        return InvalidRequestError(f"{field}: {first['msg']}", field)
    same_field = (_expected(detail) for detail in details if _field_name(detail["loc"]) == field)
    expected = "; or ".join(dict.fromkeys(same_field))
    return InvalidRequestError(f"{field}: {shown(first['input'])} was given, but {expected}", field)


def _unknown_fields(model: type[Body], details: list[ErrorDetails]) -> InvalidRequestError:
    location = details[0]["loc"]
    names = [str(detail["loc"][-1]) for detail in details]
    where = _field_name(location[:-1]) or "the request"
    close = difflib.get_close_matches(names[0], model.model_fields, 1, NEAR) if len(location) == 1 else []
    hint = f"did you mean {close[0]!r}?" if close else "leave it out or correct its name"
    message = f"unknown field {', '.join(repr(name) for name in names)} in {where}; {hint}"
    return InvalidRequestError(message, _field_name(location) or names[0])


@cache
def _model_names() -> frozenset[str]:
    """Of all objects within bodies."""
    models, names = [RequestModel], set()
    while models:
        models += (model := models.pop()).__subclasses__()
        names.add(model.__name__)
    return frozenset(names)


def _field_name(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; pydantic's names for a union's branches are left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("bool", "int", "str", *_model_names()):
            name += f".{part}" if name else part
    return name


def _expected(detail: ErrorDetails) -> str:
    return re.sub("^[A-Z][a-z]+ should", "it should", detail["msg"]).replace(" after validation", "")


def shown(value: Any) -> str:
    """What was given, as the client wrote it, or its beginning."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_INPUT else f"{text[:MAX_SHOWN_INPUT]}..."
