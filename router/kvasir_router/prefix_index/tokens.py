"""A prompt's token ids, the very ones that its engine will make: the engine's tokenizer and chat template, run here.

A wrong token would only be a cache miss that was not foreseen, but there is none. A text is cut at one special token,
which the tokenizer cuts out as well before it does anything else, and only where its other steps do not look beyond
such a cut (`find_separator`); and behind the end of a word, where the tokenizer ends a piece too (`cuts_words`). What
was seen before comes from a cache, so a prompt that begins as another did is tokenised from where it differs.
"""

import json
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import msgspec
import tokenizers

from kvasir_chat.messages import ConversationRefusedError
from kvasir_chat.template import ChatTemplate
from kvasir_router.dialects.dialect import Prompt

CHUNK_CHARACTERS = 1024
"""At least; a shorter chunk is tokenised faster by the character, up to some hundreds, and takes more of the cache."""
_END_OF_WORD = re.compile(r"[A-Za-z](?=[ \n])")
_LOOKS_ROUND = re.compile(r"\(\?<?[=!]|\\[bBAGzZ]|(?<!\[)\^|\$")
_LAST_SPACE = r"\s+(?!\S)"  # looks ahead from white space, where nothing is cut
_BOTH_SIDES = (
    ("The first", "Word", "x1", "it's", "a, b", "3 a", "\n\n  def", "\N{LATIN SMALL LETTER E WITH ACUTE}a", "  z", "A"),
    (
        " a",
        "  b",
        " \n c",
        "\nx",
        "\n\n",
        " 1",
        " 'll",
        " \N{CJK UNIFIED IDEOGRAPH-4E00}",
        " \N{COMBINING ACUTE ACCENT}",
        " .",
    ),
)
"""Of a cut: how a chunk may end, and how the next begins."""
ENTRY_BYTES = 320
"""Of a cached piece besides its text and tokens: the map's entry and the objects' heads."""


class TokenizerCard(msgspec.Struct, frozen=True):
    """What an engine answers to GET /tokenizer."""

    tokenizer: str  # tokenizer.json
    digest: str
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}


class ConversationFields(msgspec.Struct):
    """What of a chat request's body decides about its prompt, besides the messages."""

    tools: list[Any] | None = None
    documents: list[Any] | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class UnusableTokenizerError(Exception):
    """The engine's tokenizer or template cannot be used here; its prompts are matched approximately."""


@dataclass(frozen=True, slots=True)
class Separator:
    text: str
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    tokens: bytes
    num_left: int = 0
    """Characters of the text behind it."""
    share: float = 1.0
    """Of the text, up to its end."""


class PieceCache:
    """Texts and their tokens, of several tokenizers; the least recently used dropped first. Used by several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tokens: OrderedDict[tuple[object, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, owner: object, text: str) -> bytes | None:
        key = (owner, text)
        with self._lock:
            tokens = self._tokens.get(key)
            if tokens is not None:
                self._tokens.move_to_end(key)
            return tokens

    def put(self, owner: object, text: str, tokens: bytes) -> None:
        key = (owner, text)
        with self._lock:
            if key in self._tokens:
                return
            self._tokens[key] = tokens
            self.num_bytes += _num_bytes(text, tokens)
            while self.num_bytes > self._max_bytes:
                (_, oldest), its_tokens = self._tokens.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest, its_tokens)


class PromptTokenizer:
    """Used by several threads; `encode` lets others run meanwhile. `pieces` may be shared with other tokenizers."""

    def __init__(self, card: TokenizerCard, pieces: PieceCache) -> None:
        """Raises UnusableTokenizerError."""
        self.digest = card.digest
        self._owner = object()  # of pieces that may outlive this tokenizer
        self._backend = _read_backend(card.tokenizer)
        self._template = _read_template(card)
        self._pieces = pieces
        self._prefix, self._suffix = _around(self._backend)
        description = json.loads(card.tokenizer)
        self._separator = find_separator(self._backend, description, card.chat_template or "")
        self._cuts_words = cuts_words(self._backend, description)

    def tokens(self, prompt: Prompt) -> bytes | None:
        """Token ids as uint32, little-endian; None where the prompt is more than text, or will be refused."""
        if prompt.is_token_ids:
            return prompt.content
        chunks = self.chunks(prompt)
        return None if chunks is None else b"".join(chunk.tokens for chunk in chunks)

    def chunks(self, prompt: Prompt) -> Iterator[Chunk] | None:
        """The same of a text, one after the other: each is tokenised when it is asked for."""
        try:
            if prompt.messages is not None:
                return self._of_conversation(prompt)
            return self._chunks(prompt.content.decode(), add_special_tokens=True) if prompt.is_text else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        return b"".join(chunk.tokens for chunk in self._chunks(text, add_special_tokens=add_special_tokens))

    def _of_conversation(self, prompt: Prompt) -> Iterator[Chunk] | None:
        assert prompt.messages is not None
        messages = msgspec.json.decode(prompt.messages, type=list[Any])
        fields = msgspec.json.decode(msgspec.json.encode(dict(prompt.template_fields)), type=ConversationFields)
        if self._template is None or not messages or fields.chat_template is not None:
            return None
        try:
            text = self._template.render(
                messages,
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=bool(fields.continue_final_message),
                tools=fields.tools,
                documents=fields.documents,
                reasoning_effort=fields.reasoning_effort,
                variables=fields.chat_template_kwargs,
            )
        except ConversationRefusedError:
            return None
        return self._chunks(text, add_special_tokens=bool(fields.add_special_tokens))

    def _chunks(self, text: str, *, add_special_tokens: bool) -> Iterator[Chunk]:
        separator, end = self._separator, 0
        before = self._prefix if add_special_tokens else b""
        for number, piece in enumerate([text] if separator is None else text.split(separator.text)):
            if number and separator is not None:
                before, end = before + separator.tokens, end + len(separator.text)
            for chunk in self._cut(piece):
                end += len(chunk)
                yield Chunk(before + self._piece(chunk), len(text) - end, end / max(len(text), 1))
                before = b""
        if add_special_tokens and self._suffix:
            yield Chunk(self._suffix)

    def _cut(self, text: str) -> Iterator[str]:
        """From the beginning, so that texts that begin alike are cut alike."""
        start = 0
        while self._cuts_words and len(text) - start > CHUNK_CHARACTERS:
            found = _END_OF_WORD.search(text, start + CHUNK_CHARACTERS)
            if found is None:
                break
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    def _piece(self, text: str) -> bytes:
        tokens = self._pieces.get(self._owner, text)
        if tokens is None:
            tokens = _encode(self._backend, text)
            self._pieces.put(self._owner, text, tokens)
        return tokens


def find_separator(backend: tokenizers.Tokenizer, description: dict[str, Any], chat_template: str) -> Separator | None:
    """The special token that the chat template writes most often, if a text may be cut there; else None.

    `description` is tokenizer.json. The tokenizer cuts such a token out of the raw text, then normalises and splits
    what is between for itself; but not if the token takes spaces with it, if another added token overlaps it, or if a
    step asks whether a piece is the text's first.
    """
    added = description.get("added_tokens") or []
    if _asks_for_the_first(description.get("pre_tokenizer")) or any(token.get("single_word") for token in added):
        return None
    candidates = [token["content"] for token in added if _is_cut_out_first(token) and token["content"] in chat_template]
    others = [token["content"] for token in added]
    fitting = [text for text in candidates if not any(_overlap(text, other) for other in others if other != text)]
    if not fitting:
        return None
    text = max(fitting, key=chat_template.count)
    return Separator(text, _encode(backend, text))


def cuts_words(backend: tokenizers.Tokenizer, description: dict[str, Any]) -> bool:
    """Whether a text may be cut behind an ASCII letter that a space or a line's end follows.

    So it is where the tokenizer ends a piece there itself, whatever stands further off: its steps are patterns that
    look at nothing but what they match, and merges do not leave a piece. NFC composes nothing across such a cut. What
    the patterns make of many a cut is tried.
    """
    model, normalizer = description.get("model") or {}, description.get("normalizer") or {"type": "NFC"}
    is_bpe = model.get("type") == "BPE" and not model.get("dropout") and not model.get("end_of_word_suffix")
    added = description.get("added_tokens") or []
    are_plain = all(_is_cut_out_first(token) and not token.get("single_word") for token in added)
    has_cut = any(_END_OF_WORD.search(token["content"]) for token in added)
    if not is_bpe or normalizer.get("type") != "NFC" or not are_plain or has_cut:
        return False
    if not _splits_by_patterns(description.get("pre_tokenizer")):
        return False
    pre_tokenizer = backend.pre_tokenizer
    return all(
        _pieces(pre_tokenizer, left + right) == _pieces(pre_tokenizer, left) + _pieces(pre_tokenizer, right)
        and _encode(backend, left + right) == _encode(backend, left) + _encode(backend, right)
        for left in _BOTH_SIDES[0]
        if _END_OF_WORD.search(left + " ", len(left) - 1)
        for right in _BOTH_SIDES[1]
    )


def _splits_by_patterns(step: dict[str, Any] | None) -> bool:
    if step is None:
        return False
    if step.get("type") == "Sequence":
        steps = step.get("pretokenizers", ())
        return (
            bool(steps) and all(map(_splits_by_patterns, steps)) and any(part.get("type") == "Split" for part in steps)
        )
    if step.get("type") == "ByteLevel":
        return not step.get("add_prefix_space")
    if step.get("type") == "Split":
        pattern = (step.get("pattern") or {}).get("Regex", "^")
        return (
            step.get("behavior") == "Isolated"
            and not step.get("invert")
            and not _LOOKS_ROUND.search(pattern.replace(_LAST_SPACE, ""))
        )
    return False


def _pieces(pre_tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _is_cut_out_first(token: dict[str, Any]) -> bool:
    takes_spaces = token.get("lstrip") or token.get("rstrip")
    return bool(token.get("content")) and not token.get("normalized") and not takes_spaces


def _overlap(one: str, other: str) -> bool:
    if one in other or other in one:
        return True
    longest = min(len(one), len(other)) - 1
    return any(one[:size] == other[-size:] or other[:size] == one[-size:] for size in range(1, longest + 1))


def _asks_for_the_first(step: dict[str, Any] | None) -> bool:
    """Metaspace may put its mark before the whole text only."""
    if step is None:
        return False
    if step.get("type") == "Sequence":
        return any(_asks_for_the_first(part) for part in step.get("pretokenizers", ()))
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") not in ("always", "never")


def _around(backend: tokenizers.Tokenizer) -> tuple[bytes, bytes]:
    """What is put before and after a text with special tokens; it does not depend on the text."""
    bare, whole = _encode(backend, "a"), _encode(backend, "a", add_special_tokens=True)
    before, _, after = whole.partition(bare)
    return before, after


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> bytes:
    return array("I", backend.encode(text, add_special_tokens=add_special_tokens).ids).tobytes()


def _read_backend(text: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UnusableTokenizerError(f"the engine's tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_template(card: TokenizerCard) -> ChatTemplate | None:
    try:
        return None if card.chat_template is None else ChatTemplate(card.chat_template, card.special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise UnusableTokenizerError(f"the engine's chat template is no Jinja: {error}") from error


def _num_bytes(text: str, tokens: bytes) -> int:
    return sys.getsizeof(text) + len(tokens) + ENTRY_BYTES
