"""From the texts that a client wants vectors of to token ids that the model reads: one text, or two that it compares.

Texts that are too long are refused, or cut where the request says so; special tokens stay.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ContextLengthError, InvalidRequestError
from kvasir_runtime.pooling.sentence_transformers import SentenceInputs
from kvasir_runtime.server.body import shown
from kvasir_runtime.server.pooling_fields import PoolingFields
from kvasir_runtime.server.prompts import INLINE_CHARS
from kvasir_runtime.server.resolving import Limits, check_token_ids


@dataclass(frozen=True, slots=True)
class PooledText:
    token_ids: list[int]
    second_text_start: int | None = None
    """As of `Pooling`."""


class TextReader:
    """Of one request."""

    def __init__(self, tokenizer: Tokenizer, inputs: SentenceInputs, wishes: PoolingFields, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._inputs = inputs
        self._wishes = wishes
        self._limits = limits

    async def read_all(self, contents: Any, prompt: str = "") -> list[PooledText]:
        """Of a text, texts, token ids or lists of those, which are the field `input`; `prompt` stands before texts."""
        texts, several = [], self._split(contents)
        for index, content in enumerate(several):
            place = f"input[{index}]" if len(several) > 1 else "input"
            if isinstance(content, str):
                texts.append(await self.read(prompt + content, None, place))
            else:
                texts.append(self._of_ids(content, place))
            await asyncio.sleep(0)  # let others have their turn
        return texts

    async def read(self, first: str, second: str | None, param: str, *, special: bool | None = None) -> PooledText:
        """`special`: whether special tokens are added, where it is not the client's to say."""
        if self._inputs.lowercases:
            first, second = first.lower(), None if second is None else second.lower()
        adds = self._wishes.add_special_tokens if special is None else special
        num_chars = len(first) + len(second or "")
        self._check_chars(num_chars, param)
        arguments = (first, second, self.most_tokens, self._wishes.truncation_side or "right")
        if num_chars <= INLINE_CHARS:
            token_ids, start = self._tokenizer.encode_within(*arguments, add_special_tokens=adds)
        else:
            token_ids, start = await asyncio.to_thread(
                self._tokenizer.encode_within, *arguments, add_special_tokens=adds
            )
        return self._checked(PooledText(token_ids, start), param)

    async def cut(self, text: str, most_tokens: int | None) -> str:
        """The beginning of a text that has at most so many tokens, or the text itself."""
        if not most_tokens:
            return text
        return await asyncio.to_thread(self._tokenizer.beginning, text, most_tokens)

    @property
    def most_tokens(self) -> int | None:
        """That are left of a text; None: all."""
        asked, most = self._wishes.truncate_prompt_tokens, self._limits.max_model_len
        if asked is None:
            return None
        if asked > most:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {asked}, but the model reads at most {most} tokens; -1 stands for these",
                "truncate_prompt_tokens",
            )
        if asked == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0, which leaves nothing; leave it out, or ask for 1 or more, or for -1",
                "truncate_prompt_tokens",
            )
        return most if asked == -1 else asked

    def _of_ids(self, content: Any, place: str) -> PooledText:
        if not isinstance(content, list) or set(map(type, content)) - {int}:
            raise _wrong_input(content, place)
        most = self.most_tokens
        if most is not None:
            content = content[-most:] if self._wishes.truncation_side == "left" else content[:most]
        return self._checked(PooledText(content), place)

    def _checked(self, text: PooledText, param: str) -> PooledText:
        num_tokens, most = len(text.token_ids), self._limits.max_model_len
        if not num_tokens:
            raise InvalidRequestError(f"{param}: it is empty, but a vector is made of one token at least", param)
        if num_tokens > most:
            raise ContextLengthError(
                f"{param}: it has {num_tokens} tokens, but the model reads at most {most}; shorten it, or have it cut "
                "with truncate_prompt_tokens: -1",
                param,
            )
        check_token_ids(text.token_ids, self._limits.vocab_size, param)
        return text

    def _check_chars(self, num_chars: int, param: str) -> None:
        """Refuse a text that is certainly too long before reading it."""
        longest, most = self._tokenizer.max_chars_per_token, self._limits.max_model_len
        if longest is not None and self._wishes.truncate_prompt_tokens is None and num_chars > most * longest:
            raise ContextLengthError(
                f"{param}: it has {num_chars} characters, which is at least {-(-num_chars // longest)} tokens, but the "
                f"model reads at most {most}; shorten it, or have it cut with truncate_prompt_tokens: -1",
                param,
            )

    def _split(self, contents: Any) -> Sequence[Any]:
        """The inputs of a request, told apart by the first element alone."""
        if isinstance(contents, str):
            return [contents]
        if not isinstance(contents, list) or not contents:
            raise _wrong_input(contents)
        if type(contents[0]) is int:
            return [contents]
        if type(contents[0]) not in (str, list):
            raise _wrong_input(contents)
        check_number(len(contents), self._limits, "input")
        return contents


def check_number(num_texts: int, limits: Limits, param: str) -> None:
    if num_texts > limits.max_sequences:
        raise InvalidRequestError(
            f"{param}: {num_texts} texts were given, but this server reads at most {limits.max_sequences} a request "
            "(--max-request-sequences); send several requests",
            param,
        )


def _wrong_input(seen: Any, place: str = "input") -> InvalidRequestError:
    given = "nothing" if seen is None else shown(seen[:8] if isinstance(seen, list) else seen)
    return InvalidRequestError(
        f"{place}: {given} was given, but input should be a text, a list of texts, a list of token ids or a list of "
        "those, and not empty",
        place,
    )
