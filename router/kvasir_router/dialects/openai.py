"""What OpenAI's APIs have in common: streams of events, errors, and how text and token ids are written in JSON."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from kvasir_router.dialects.dialect import ABSENT, Prompt, RoutingFields, is_too_much, seed
from kvasir_router.errors import RequestError

END_OF_STREAM = b"data: [DONE]\n\n"
EXPECTED_OUTPUT_TOKENS = 256
"""Of a request that generates text: how long its output gets is not known beforehand."""


class OpenAIErrors:
    def error_body(self, error: RequestError) -> bytes:
        """The JSON body {"error": {message, type, param, code}}."""
        told = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
        return msgspec.json.encode({"error": told})

    def error_event(self, error: RequestError) -> bytes:
        return b"data: " + self.error_body(error) + b"\n\n"


def text_prompt(raw: msgspec.Raw, api: str, model: str | None, fields: RoutingFields) -> Prompt | None:
    """Of a text, texts, token ids or lists of those; None where it is absent. Anything else is the engine's to refuse.

    Raises msgspec.DecodeError or UnicodeError.
    """
    if raw is ABSENT:
        return None
    if fields.is_large and bytes(memoryview(raw)[:1]) != b'"' and is_too_much(raw):
        text = bytes(raw)
        return raw_prompt(text, api, model, fields, is_batch=b"[" in text[1:] or b'"' in text)
    prompt = msgspec.json.decode(raw)
    is_text = isinstance(prompt, str)
    is_token_ids = isinstance(prompt, list) and not all(isinstance(part, str) for part in prompt)
    return Prompt(
        _token_bytes(prompt) if is_token_ids else _text_bytes(prompt),
        is_token_ids=is_token_ids,
        seed=seed(api, model, fields),
        is_text=is_text,
        is_batch=isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)),
        model=model,
        cache_salt=fields.cache_salt,
    )


def raw_prompt(raw: bytes, api: str, model: str | None, fields: RoutingFields, *, is_batch: bool = False) -> Prompt:
    """Of JSON that is too much to decode: counted as if it were a text, which for token ids is not far off."""
    return Prompt(
        raw,
        is_token_ids=False,
        seed=seed(api, model, fields),
        is_batch=is_batch,
        model=model,
        cache_salt=fields.cache_salt,
    )


def _text_bytes(prompt: Any) -> bytes:
    if isinstance(prompt, list):
        return "\0".join(prompt).encode()
    return prompt.encode() if isinstance(prompt, str) else b""


def _token_bytes(prompt: Sequence[Any]) -> bytes:
    ids = array("I")
    try:
        for part in prompt:
            ids.extend(part) if isinstance(part, list) else ids.append(part)
        return ids.tobytes()
    except (TypeError, OverflowError):
        return b""
