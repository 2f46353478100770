"""Fields that clients of other servers send: hints, which change nothing here, and wishes that only others grant.

A hint is accepted with any value, wherever it stands, and named in the log the first time it comes. A wish is accepted
with the value that asks for nothing, and refused by name with any other.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from kvasir_runtime.errors import InvalidRequestError

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
    "stream_interval", "truncation_side", "use_audio_in_video",
})  # fmt: skip
MAX_NAME_CHARS = 64  # of a key that the log names
HINTS = _OPENAI | _REASONING | _MESSAGES | _GATEWAYS | _ENGINES


UNSUPPORTED = "this server does not support it; leave it out"
_OLD_NAMES = {
    "functions": "this server does not know this older name; send tools",
    "function_call": "this server does not know this older name; send tool_choice",
}
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_WISHES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            # OpenAI
            "audio", "plugins", "prediction", "suffix", "tools",
            # vLLM
            "allowed_token_ids", "bad_words", "chat_template", "echo", "ec_transfer_params", 
            "logits_processors", "logprob_token_ids", "prompt_embeds",
            "prompt_logprobs", "repetition_detection", "return_prompt_text", "structural_tag", 
            "truncate_prompt_tokens", "vllm_xargs", "watermarking",
            # SGLang
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "custom_params", "ebnf",
            "input_ids", "json_schema", "lora_path", "no_stop_trim", "regex", "return_cached_tokens_details",
            "return_hidden_states", "return_meta_info", "return_prompt_token_ids", "return_routed_experts",
            "session_params", "stop_regex", "task",
            # llama.cpp
            "dry_multiplier", "dynatemp_range", "grammar", "min_keep", "mirostat", "n_probs", "post_sampling_probs",
            "return_progress", "samplers", "t_max_predict_ms", "timings_per_token", "top_a", "top_n_sigma",
            "xtc_probability",
        ),
        _NOTHING,
    ),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typical_p"), (None, 1)),
    **dict.fromkeys(_OLD_NAMES, _NOTHING),
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
    return name if name in _WISHES else _hint(name, info)


class RequestModel(BaseModel):
    """An object within a body; a key that is neither a field nor a hint is an error."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[Annotated[str, AfterValidator(_hint)], Any] = Field(init=False)


class Body(RequestModel):
    __pydantic_extra__: dict[Annotated[str, AfterValidator(_hint_or_wish)], Any] = Field(init=False)

    def check_wishes(self) -> None:
        """Raises InvalidRequestError for one that is not granted here."""
        for name, value in (self.model_extra or {}).items():
            if name in _WISHES and value not in _WISHES[name]:
                raise InvalidRequestError(f"{name}: {_OLD_NAMES.get(name, UNSUPPORTED)}", name)


def _taken(name: str, info: ValidationInfo) -> str:
    if isinstance(info.context, set):
        info.context.add(name[:MAX_NAME_CHARS])
    return name


class LenientBody(Body):
    """Of an API whose clients send new fields with each of their releases: what is not known is taken as a hint."""

    __pydantic_extra__: dict[Annotated[str, AfterValidator(_taken)], Any] = Field(init=False)


def _refuse_unless_empty(value: Any) -> Any:
    if value in _NOTHING:
        return None
    raise PydanticCustomError("unsupported", UNSUPPORTED)


Unsupported = Annotated[Any, AfterValidator(_refuse_unless_empty)]
"""A wish within a message."""
