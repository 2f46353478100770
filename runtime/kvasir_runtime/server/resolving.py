"""From what a client asked for to the requests, of real values only, that the engine works on.

A value comes from the request, else from the checkpoint's generation_config.json, else it is OpenAI's default. What
only the loaded model can tell (context length, vocabulary, limits of this server) is checked here.
"""

import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from kvasir_runtime.checkpoint_json import ADVICE, read_json_object_if_there, shortened
from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.detokenizer import TextOptions
from kvasir_runtime.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import MAX_STOP_TOKEN_IDS, BeamSearch, SamplingParams
from kvasir_runtime.server.errors import NotTheRouterError
from kvasir_runtime.server.protocol import (
    GenerationFields,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    Whole,
)
from kvasir_runtime.server.token_rules import ALLOWED_FIELD, check_something_is_left
from kvasir_runtime.service_secret import SECRET_VARIABLE
from kvasir_runtime.transfer.params import KvTransferParams

TENANT_HEADER = "x-kvasir-tenant"
"""Set by the router from the client's key; names whose share of the engine a request uses (see `trust`)."""
UINT64_MASK = 2**64 - 1
KV_FIELD = "kv_transfer_params"
TRUST_FLAG = "--kv-transfer-trust-clients"
STRANGER = "kvasir.stranger"
"""In the ASGI scope of a request that is not the router's (`trust`)."""
T = TypeVar("T")


def _listed(value: Any) -> Any:
    """One or several, or null, which means none."""
    return value if isinstance(value, list) else [] if value is None else [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the checkpoint recommends; None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Of requests that bring none; None: each draws its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this server with this model can do."""

    max_model_len: int
    vocab_size: int
    max_n: int
    max_num_seqs: int
    max_sequences: int
    """Of one request: its prompts times the sequences of each."""
    max_logprobs: int


class _Recommended(BaseModel):
    """What is read of generation_config.json, as strictly as what comes from clients."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    eos_token_id: Annotated[list[Whole], BeforeValidator(_listed), Field(max_length=MAX_STOP_TOKEN_IDS)] = []


def load_sampling_defaults(folder: Path, tokenizer_eos: int | None, seed: int | None) -> SamplingDefaults:
    """From generation_config.json, and config.json where that names no end-of-sequence id. Raises ModelLoadError."""
    recommended = _recommended(folder / "generation_config.json")
    ids = recommended.eos_token_id or _recommended(folder / "config.json", {"eos_token_id"}).eos_token_id
    if tokenizer_eos is not None:
        ids = [*ids, tokenizer_eos]
    return SamplingDefaults(
        temperature=recommended.temperature,
        top_p=recommended.top_p,
        top_k=recommended.top_k,
        min_p=recommended.min_p,
        repetition_penalty=recommended.repetition_penalty,
        eos_token_ids=tuple(dict.fromkeys(ids)),
        seed=seed,
    )


def _recommended(file: Path, names: Set[str] = frozenset(_Recommended.model_fields)) -> _Recommended:
    """Of the keys `names`; empty where there is no such file."""
    values = {name: value for name, value in read_json_object_if_there(file).items() if name in names}
    try:
        return _Recommended.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ModelLoadError(
            f"{file}: {name!r} is {shortened(values[name])}: {first['msg']}, as for a request; {ADVICE}"
        ) from error


def resolved(
    wishes: GenerationFields,
    prompts: Sequence[list[int]],
    request: Request,
    *,
    request_id: str,
    defaults: SamplingDefaults,
    limits: Limits,
    kv_transfer: KvTransferConfig | None,
    grammar: str | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    shown_special_ids: Set[int] = frozenset(),
) -> list[GenerateRequest]:
    """One request for the token ids of each prompt. Raises InvalidRequestError, naming the field at fault."""
    kv_transfer_params = transfer_params(request, wishes, kv_transfer, len(prompts))
    return [
        GenerateRequest(
            request_id=request_id,
            spec=RequestSpec(
                prompt_token_ids=prompt,
                sampling=_sampling_params(wishes, len(prompt), defaults, limits, bad_words),
                beam=_beam_search(wishes),
                priority=wishes.priority,
                tenant=request.headers.get(TENANT_HEADER, ""),
                cache_salt=wishes.cache_salt,
                grammar=grammar,
                kv_transfer_params=kv_transfer_params,
            ),
            text=TextOptions(
                stop=wishes.stop_strings,
                include_stop_str_in_output=wishes.include_stop_str_in_output,
                skip_special_tokens=wishes.skip_special_tokens,
                shown_special_ids=shown_special_ids,
                min_tokens=wishes.min_tokens,
            ),
            n=wishes.num_sequences,
        )
        for prompt in prompts
    ]


def _sampling_params(
    request: GenerationFields,
    num_prompt_tokens: int,
    defaults: SamplingDefaults,
    limits: Limits,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    _check_limits(request, limits)
    max_tokens = _max_tokens(request, num_prompt_tokens, limits.max_model_len)
    logprobs = request.num_logprobs
    if logprobs is None and request.num_sequences > request.num_returned:
        logprobs = 0  # what candidates are ranked by
    seed = _first(request.seed, defaults.seed, None)
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=(secrets.randbits(64) if seed is None else seed) & UINT64_MASK,
        min_tokens=min(request.min_tokens, max_tokens),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, limits.vocab_size),
        allowed_token_ids=_allowed_token_ids(request.allowed_token_ids, limits.vocab_size),
        bad_words=bad_words,
        logprobs=logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        stop_token_ids=_stop_token_ids(request, defaults, limits.vocab_size),
    )
    kept_back = params.stop_token_ids if params.min_tokens else ()
    if params.allowed_token_ids is not None or bad_words:
        check_something_is_left(params.allowed_token_ids, bad_words, kept_back, limits.vocab_size)
    return params if request.use_beam_search else _with_draws(params, request, defaults, limits.vocab_size)


def _with_draws(
    params: SamplingParams, request: GenerationFields, defaults: SamplingDefaults, vocab_size: int
) -> SamplingParams:
    """How tokens are drawn; a beam search draws none, so what is asked for of these means nothing to it."""
    top_k = _first(request.top_k, defaults.top_k, -1)
    return msgspec.structs.replace(
        params,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=top_k if 0 < top_k < vocab_size else None,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
    )


def _beam_search(request: GenerationFields) -> BeamSearch | None:
    if not request.use_beam_search:
        return None
    return BeamSearch(
        width=request.num_candidates,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
    )


def transfer_params(
    request: Request, wishes: GenerationFields, transfer: KvTransferConfig | None, num_prompts: int = 1
) -> KvTransferParams | None:
    """None where nothing is asked for. Raises InvalidRequestError, and NotTheRouterError for a stranger's: this engine
    would connect to whatever they name, and keep blocks for whoever comes.
    """
    fields = wishes.kv_transfer_params
    if fields is None:
        return None
    params = KvTransferParams(
        do_remote_prefill=bool(fields.do_remote_prefill),
        do_remote_decode=bool(fields.do_remote_decode),
        remote_engine_id=fields.remote_engine_id,
        remote_request_id=fields.remote_request_id,
        remote_host=fields.remote_host,
        remote_port=fields.remote_port,
        transfer_id=fields.transfer_id,
    )
    if not (params.is_pull or params.do_remote_decode):
        return None
    if STRANGER in request.scope:
        raise NotTheRouterError(
            f"{KV_FIELD}: only the router may say whom this engine exchanges KV with; it shows the value of "
            f"{SECRET_VARIABLE}, which both must be started with. For a router of another make start this engine with "
            f"{TRUST_FLAG}, where nobody else reaches it"
        )
    _check_transfer(params, transfer, num_prompts)
    return params


def _check_transfer(params: KvTransferParams, transfer: KvTransferConfig | None, num_prompts: int) -> None:
    if transfer is None:
        raise InvalidRequestError(
            f"{KV_FIELD}: this server exchanges no KV with other engines; start it with --kv-transfer-config", KV_FIELD
        )
    if params.do_remote_decode and not transfer.can_produce:
        raise InvalidRequestError(
            f"{KV_FIELD}: do_remote_decode was asked of a server with kv_role kv_consumer", KV_FIELD
        )
    if params.is_pull and not transfer.can_consume:
        raise InvalidRequestError(
            f"{KV_FIELD}: do_remote_prefill was asked of a server with kv_role kv_producer", KV_FIELD
        )
    if num_prompts > 1:
        raise InvalidRequestError(
            f"{KV_FIELD} belongs to one prompt, but {num_prompts} were given; send several requests", KV_FIELD
        )


def _first(asked: T | None, recommended: T | None, default: T) -> T:
    if asked is not None:
        return asked
    return default if recommended is None else recommended


def _check_limits(request: GenerationFields, limits: Limits) -> None:
    if request.num_candidates > limits.max_n:
        field = "n" if request.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{field}: {request.num_candidates} sequences were asked for, but this server makes at most {limits.max_n} "
            "per prompt (--max-n); send several requests",
            field,
        )
    if request.use_beam_search and request.num_candidates > limits.max_num_seqs:
        raise InvalidRequestError(
            f"use_beam_search: a beam of {request.num_candidates} was asked for, but this server computes at most "
            f"{limits.max_num_seqs} sequences together (--max-num-seqs); ask for a narrower one",
            "use_beam_search",
        )
    if (request.num_logprobs or 0) > limits.max_logprobs:
        raise InvalidRequestError(
            f"{request.num_logprobs} alternatives per token were asked for, but this server reports at most "
            f"{limits.max_logprobs} (--max-logprobs)",
            "top_logprobs" if "top_logprobs" in type(request).model_fields else "logprobs",
        )
    if (request.prompt_logprobs or 0) > limits.max_logprobs:
        raise InvalidRequestError(
            f"prompt_logprobs: {request.prompt_logprobs} alternatives per token were asked for, but this server "
            f"reports at most {limits.max_logprobs} (--max-logprobs)",
            "prompt_logprobs",
        )


def _max_tokens(request: GenerationFields, num_prompt_tokens: int, max_model_len: int) -> int:
    check_fits(num_prompt_tokens, max_model_len, "messages" if "messages" in type(request).model_fields else "prompt")
    room, asked = max_model_len - num_prompt_tokens, request.max_new_tokens
    if asked is None:
        return room
    field = request.token_limit_field
    if asked > room and request.is_cut_to_context:
        return room
    if asked > room:
        raise ContextLengthError(
            f"{field} is {asked} and the prompt has {num_prompt_tokens} tokens, but the model's context is "
            f"{max_model_len} tokens, prompt and output together; ask for at most {room} or shorten the prompt",
            field,
        )
    if asked < 1:
        raise InvalidRequestError(f"{field}: 0 was given, but at least 1 token is generated", field)
    return asked


def most_prompt_tokens(request: GenerationFields, max_model_len: int) -> int | None:
    """That are read of a prompt, its last ones; None: all. Raises InvalidRequestError."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return None
    if asked == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, which leaves nothing; leave it out, or ask for 1 or more, or for -1",
            "truncate_prompt_tokens",
        )
    if asked > max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {asked}, but the model's context is {max_model_len} tokens; -1 stands for as "
            "many as there is room for",
            "truncate_prompt_tokens",
        )
    return max(1, max_model_len - (request.max_new_tokens or 1)) if asked == -1 else asked


def check_fits(num_prompt_tokens: int, max_model_len: int, param: str) -> None:
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, but the model's context is {max_model_len} tokens, prompt and "
            "output together; shorten the prompt",
            param,
        )


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    resolved = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocab_size):
            raise InvalidRequestError(
                f"logit_bias: {key[:40]!r} is no token id; keys are ids from 0 to {vocab_size - 1}, as strings",
                "logit_bias",
            )
        resolved[int(key)] = value
    return resolved


def _allowed_token_ids(asked: Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if asked is None:
        return None
    check_token_ids(asked, vocab_size, ALLOWED_FIELD)
    return tuple(sorted(set(asked)))


def _stop_token_ids(request: GenerationFields, defaults: SamplingDefaults, vocab_size: int) -> tuple[int, ...]:
    asked = request.stop_token_ids or []
    check_token_ids(asked, vocab_size, "stop_token_ids")
    ends = () if request.ignore_eos else defaults.eos_token_ids
    return tuple(dict.fromkeys([*asked, *(token_id for token_id in ends if 0 <= token_id < vocab_size)]))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if min(token_ids, default=0) >= 0 and max(token_ids, default=0) < vocab_size:
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequestError(
        f"{param}: token id {wrong} is not in the vocabulary; ids go from 0 to {vocab_size - 1}", param
    )
