"""Reads the few fields of a request that routing needs: model, stream, and the prompt's length and prefix hashes.

The engine validates everything else; the original bytes travel on untouched, so a wrong type here is not an error. Only
a model's alias, which no engine knows, is replaced by the model's own name.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvasir_router.errors import MalformedRequestError
from kvasir_router.prefix_index.approximate import hash_blocks, hash_seed

_BYTES_PER_TOKEN_ID = 4
# Output that a request is expected to hold in the KV cache besides its prompt: its length is not known beforehand.
EXPECTED_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class PromptSettings:
    block_tokens: int
    bytes_per_token: float  # estimate for text; token ids are exact


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    path: str  # with the query string, as the client sent it
    model: str | None  # as engines know it; None when absent or not a string: the engine says what is wrong
    is_stream: bool
    num_prompt_tokens: int  # estimated for text, exact for token ids
    block_hashes: tuple[int, ...]  # chained: one for every full block of the prompt
    has_alias: bool = False  # the client has called the model otherwise

    @property
    def num_resident_tokens(self) -> int:
        """KV tokens that it will hold at its end, as far as can be guessed; none without a prompt (/tokenize)."""
        return self.num_prompt_tokens + EXPECTED_OUTPUT_TOKENS if self.num_prompt_tokens else 0


_ABSENT = msgspec.Raw(b"null")


class _Body(msgspec.Struct, gc=False):
    # Raw leaves what is not needed undecoded: a 40 kB body costs microseconds.
    model: Any = None
    stream: Any = False
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT


_decoder = msgspec.json.Decoder(_Body)
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse(
    path: str, body: bytes, settings: PromptSettings, resolve: Callable[[str], str] = lambda model: model
) -> InferenceRequest:
    """Raises MalformedRequestError (400) when the body is not a JSON object in UTF-8.

    `resolve` gives the name by which engines know the model that the client has named.
    """
    try:
        fields = _decoder.decode(body)
        prompt, bytes_per_token = _canonical_prompt(fields, settings.bytes_per_token)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequestError(f"the request body is not a JSON object: {error}") from error
    asked = fields.model if isinstance(fields.model, str) else None
    model = None if asked is None else resolve(asked)
    return InferenceRequest(
        path=path,
        model=model,
        is_stream=fields.stream is True,
        num_prompt_tokens=int(len(prompt) / bytes_per_token),
        block_hashes=hash_blocks(prompt, int(settings.block_tokens * bytes_per_token), _seed(path, model, fields)),
        has_alias=model != asked,
    )


def engine_body(request: InferenceRequest, body: bytes) -> bytes:
    """The client's own bytes; where it has used an alias, with the model's name, and every other value's own bytes."""
    if not request.has_alias:
        return body
    members = _members_decoder.decode(body)
    members["model"] = msgspec.Raw(msgspec.json.encode(request.model))
    return msgspec.json.encode(members)


def _seed(path: str, model: str | None, fields: _Body) -> int:
    """Prompts share blocks only within a model, a salt and a way of being turned into tokens."""
    return hash_seed(path.encode(), (model or "").encode(), bytes(fields.cache_salt))


def _canonical_prompt(fields: _Body, bytes_per_token: float) -> tuple[bytes, float]:
    """The prompt as bytes that grow at the end when a conversation grows, and how many of them make a token."""
    if fields.messages is not _ABSENT:
        return _canonical_chat(fields.messages, fields.tools), bytes_per_token
    prompt = msgspec.json.decode(fields.prompt)
    if isinstance(prompt, str):
        return prompt.encode(), bytes_per_token
    if not isinstance(prompt, list):
        return b"", bytes_per_token
    if all(isinstance(part, str) for part in prompt):
        return "\0".join(prompt).encode(), bytes_per_token
    return _token_bytes(prompt), _BYTES_PER_TOKEN_ID


def _canonical_chat(messages: msgspec.Raw, tools: msgspec.Raw) -> bytes:
    """All messages in order with their roles, keys sorted; tools first, where chat templates put them."""
    decoded = msgspec.json.decode(messages)
    parts: list[Any] = [msgspec.json.decode(tools)] if tools is not _ABSENT else []
    parts.extend(decoded if isinstance(decoded, list) else [decoded])
    return b"\n".join(msgspec.json.encode(part, order="sorted") for part in parts)


def _token_bytes(prompt: Iterable[Any]) -> bytes:
    """Token ids, or lists of them, as uint32; anything else is the engine's to refuse."""
    flat: list[Any] = []
    for part in prompt:
        flat.extend(part) if isinstance(part, list) else flat.append(part)
    try:
        return array("I", flat).tobytes()
    except (TypeError, OverflowError):
        return b""
