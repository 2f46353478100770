"""Tokens that a client rules out: all but `allowed_token_ids`, and those that would complete one of its `bad_words`.

A word is known by its tokens, as the tokenizer writes it alone and behind a space. Together the rules always leave
something to draw, whatever the output is.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.structured import StructuredFields

MAX_BAD_WORDS = 256
MAX_WORD_CHARS = 1024
MAX_WORD_TOKENS = 32
"""All words are compared with each output's end, at each token."""
ALLOWED_FIELD, WORDS_FIELD = "allowed_token_ids", "bad_words"
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]


class TokenRuleFields(StructuredFields):
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None


def spelt(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Their tokens. Raises InvalidRequestError."""
    spellings: dict[tuple[int, ...], None] = {}
    for number, word in enumerate(words):
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False)) if word.strip() else ()
            _check_length(number, len(tokens))
            if max(tokens) < vocab_size:  # else the model never says it
                spellings[tokens] = None
    return tuple(spellings)


def _check_length(number: int, num_tokens: int) -> None:
    field = f"{WORDS_FIELD}[{number}]"
    if not num_tokens:
        raise InvalidRequestError(f"{field}: it is nothing but white space; leave it out", WORDS_FIELD)
    if num_tokens > MAX_WORD_TOKENS:
        raise InvalidRequestError(
            f"{field}: it has {num_tokens} tokens, but at most {MAX_WORD_TOKENS} are looked for; shorten it",
            WORDS_FIELD,
        )


def check_something_is_left(
    allowed: Sequence[int] | None, words: Sequence[Sequence[int]], kept_back: Sequence[int], vocab_size: int
) -> None:
    """Where there are rules. `kept_back` are not drawn at first (min_tokens). Raises InvalidRequestError."""
    left = set(range(vocab_size) if allowed is None else allowed)
    if left <= set(kept_back).union(word[-1] for word in words):
        field = WORDS_FIELD if allowed is None else ALLOWED_FIELD
        raise InvalidRequestError(
            f"{field}: nothing may be left to draw: each token that is allowed ends one of bad_words, or the answer "
            "before min_tokens; allow one more",
            field,
        )
