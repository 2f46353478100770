"""The text of a sequence as its tokens come, each at the same cost however long the text has become.

`TokenText` turns token ids into text behind the prompt's, and never gives out half a character; `StopStrings` holds
back what may yet become a stop string; `Detokenizer` joins both for one request. What is given out adds up to what all
tokens decode to at once without what the prompt's do, but where byte tokens are no valid UTF-8: there the valid bytes
before are given out as text. A stream and a whole answer go through the same code, so they are equal.
"""

import codecs
import itertools
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from kvasir_runtime.engine.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING_TOKENS = 8
"""A character has at most four bytes and each token at least one, so more pending tokens than this are no character."""


CONTINUATION_BYTES = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
"""Of UTF-8: a character never begins with one."""


class TextStream(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    def pending(self) -> str:
        """What is left of an incomplete character, as replacement characters."""


class ByteLevelStream:
    """For tokenizers whose text is exactly the concatenation of their tokens' bytes (GPT-2, Llama 3, Qwen, ...).

    One look-up and one UTF-8 decoder step: 0.5 us a token, against 3.3 us for the window below.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id >= len(self._token_bytes):  # the model's vocabulary may be padded beyond the tokenizer's
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def pending(self) -> str:
        state = self._decoder.getstate()
        text = self._decoder.decode(b"", final=True)
        self._decoder.setstate(state)
        return text


class WindowStream:
    """For every other tokenizer (sentencepiece with byte fallback, word pieces): decodes a short window of tokens.

    The window starts with tokens whose text is out already, because a decoder may strip or add spaces at its start.
    `tokenizers.decoders.DecodeStream` (0.23) will not do, although it takes 3.2 us a token to our 5.4: it keeps an
    unfinished character to itself at the end, and invalid bytes for ever (2,000 of them gave no text in 1.8 s).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_pending = 0  # tokens at the window's end whose text is not out
        self._num_chars_out = 0  # of the window's text

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_pending += 1
        text = self._tokenizer.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._give_out_all(text)
        if self._num_pending < MAX_PENDING_TOKENS:
            return ""
        return self._give_out_invalid(text)

    def pending(self) -> str:
        return self._tokenizer.decode(self._window)[self._num_chars_out :]

    def _give_out_all(self, text: str) -> str:
        new_text = text[self._num_chars_out :]
        if text:  # else the window's tokens have no text of their own, and cannot be context for the next
            self._window = self._window[-self._num_pending :]
            self._num_pending = 0
        self._num_chars_out = len(self._tokenizer.decode(self._window))
        return new_text

    def _give_out_invalid(self, text: str) -> str:
        """The bytes are no UTF-8: give out all but the last three, which may still begin a character."""
        new_text = self._settled(text)[self._num_chars_out :]
        self._num_chars_out += len(new_text)
        if len(self._window) > 4 * MAX_PENDING_TOKENS:
            self._window = self._window[-MAX_PENDING_TOKENS:]
            self._num_chars_out = len(self._settled(self._tokenizer.decode(self._window)))
        return new_text

    @staticmethod
    def _settled(text: str) -> str:
        num_invalid = len(text) - len(text.rstrip(REPLACEMENT))
        return text[: len(text) - min(3, num_invalid)]


class TokenText:
    """The text of tokens behind those of `context`, whose own text is not given out: a decoder may strip a text's first
    space, and a character may be complete only with the tokens that follow the prompt. Special tokens are left out
    where they are to be skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown_special_ids: Set[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        self._stream: TextStream = (
            ByteLevelStream(tokenizer.bytes_by_id) if tokenizer.bytes_by_id is not None else WindowStream(tokenizer)
        )
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_special_ids:
            self._skipped_ids -= shown_special_ids
        shown = [token_id for token_id in context[-2 * MAX_PENDING_TOKENS :] if token_id not in self._skipped_ids]
        behind_a_cut = partial(_begins_within_a_character, tokenizer)
        for token_id in itertools.dropwhile(behind_a_cut, shown[-MAX_PENDING_TOKENS:]):
            self._stream.feed(token_id)
        self._half_character = self._stream.pending()

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped_ids else self._behind_context(self._stream.feed(token_id))

    def finish(self) -> str:
        return self._behind_context(self._stream.pending())

    def _behind_context(self, text: str) -> str:
        """Without what the context's own text ends with, if that has not become a character."""
        if self._half_character and text:
            text, self._half_character = text.removeprefix(self._half_character), ""
        return text


def _begins_within_a_character(tokenizer: Tokenizer, token_id: int) -> bool:
    return tokenizer.token_bytes(token_id)[:1] in CONTINUATION_BYTES


class CutText(NamedTuple):
    text: str
    """What may be given out."""
    stop: str | None
    """The stop string that ends it, if one does."""


class StopStrings:
    """Cuts a growing text at the first stop string; text that may be the beginning of one is held back.

    What is held back is looked through from its start, and what cannot begin a stop string is not looked at again: 32
    stop strings of 1,024 characters cost 0.04 ms a token, and 0.5 ms where all that was held back is let go.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = sorted(stop)
        self._longest = max(map(len, stop))
        self._include_in_output = include_in_output
        self._held = ""

    @property
    def held(self) -> str:
        """What may yet become a stop string."""
        return self._held

    def is_completed_by(self, text: str) -> bool:
        """Whether a stop string would end in this text, were it fed."""
        return any(stop in self._held + text for stop in self._stop)

    def feed(self, text: str) -> CutText:
        num_held = len(self._held)
        text = self._held + text
        places = ((text.find(stop, max(0, num_held - len(stop) + 1)), stop) for stop in self._stop)
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is not None:
            at, stop = found
            self._held = ""
            return CutText(text[: at + len(stop)] if self._include_in_output else text[:at], stop)
        first = max(0, len(text) - self._longest + 1)
        held_at = next((at for at in range(first, len(text)) if self._is_beginning(text[at:])), len(text))
        self._held = text[held_at:]
        return CutText(text[:held_at], None)

    def finish(self) -> str:
        """What was held back, when the sequence ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _is_beginning(self, text: str) -> bool:
        """Of a stop string: those that begin so follow each other in their order."""
        at = bisect_left(self._stop, text)
        return at < len(self._stop) and self._stop[at].startswith(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How one request wants its text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: Set[int] = frozenset()
    """Special tokens that are shown even so."""
    min_tokens: int = 0
    """Stop strings are not looked for in the text of the first so many tokens."""


class NewText(NamedTuple):
    """What tokens brought to the text of their sequence."""

    text: str
    stop: str | None
    """The stop string that ended the sequence, if one did."""
    num_tokens: int
    """How many of the tokens were used until then."""


class Detokenizer:
    """The text of one sequence. After `feed` has named a stop string, nothing more may be fed."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, prompt_token_ids: Sequence[int] = ()) -> None:
        self._text = TokenText(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            shown_special_ids=options.shown_special_ids,
            context=prompt_token_ids,
        )
        self._stops = _Stops(tokenizer, options) if options.stop else None
        self._include_stop_token = options.include_stop_str_in_output
        self._num_tokens_before_stop = options.min_tokens

    def feed(self, token_ids: Sequence[int]) -> NewText:
        new_text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text = self._text.feed(token_id)
            self._num_tokens_before_stop -= 1
            if self._stops is None or self._num_tokens_before_stop >= 0:
                new_text += text
                continue
            text, stop = self._stops.feed(text, token_id)
            new_text += text
            if stop is not None:
                return NewText(new_text, stop, num_tokens)
        return NewText(new_text, None, len(token_ids))

    def finish(self, token_ids: Sequence[int], stop_token_id: int | None) -> NewText:
        """Like `feed` for the last tokens; a stop token among them shows only where stop strings are to be shown."""
        shown = token_ids if stop_token_id is None or self._include_stop_token else token_ids[:-1]
        new = self.feed(shown)
        if new.stop is not None:
            return new
        rest = CutText(self._text.finish(), None)
        if self._stops is not None:
            rest = self._stops.finish(rest.text)
        return NewText(new.text + rest.text, rest.stop, len(token_ids))


class _Stops:
    """The stop strings of one request, in the text that is shown and, for those with special tokens that are not, in
    the text with these. There each is a lone surrogate, which no text has: a spelling that looks alike is not it.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._shown = StopStrings(options.stop, options.include_stop_str_in_output)
        self._includes = options.include_stop_str_in_output
        self._mark_of: dict[int, str] = {}
        hidden = options.stop if options.skip_special_tokens else ()
        marked = {self._marked(tokenizer, stop): stop for stop in hidden}
        self._as_given = {text: stop for text, stop in marked.items() if text != stop}
        self._unmarked = dict.fromkeys(map(ord, self._mark_of.values()))
        self._hidden = StopStrings(list(self._as_given), include_in_output=False) if self._mark_of else None

    def feed(self, text: str, token_id: int) -> CutText:
        if self._hidden is None:
            return self._shown.feed(text) if text else CutText("", None)
        text, stop = self._hidden.feed(text + self._mark_of.get(token_id, ""))
        cut = self._shown.feed(text.translate(self._unmarked))
        if cut.stop is not None:
            return cut
        if stop is None:
            more = self._ended_in_held()
            return CutText(cut.text + more.text, more.stop)
        as_given = self._as_given[stop]
        return CutText(cut.text + self._shown.finish() + (as_given if self._includes else ""), as_given)

    def _ended_in_held(self) -> CutText:
        """What is held back for the sake of a special token may hold a stop string without one."""
        assert self._hidden is not None
        held = self._hidden.held.translate(self._unmarked)
        if not (held and self._shown.is_completed_by(held)):
            return CutText("", None)
        self._hidden.finish()
        return self._shown.feed(held)

    def finish(self, text: str) -> CutText:
        """With the last of the text, where the sequence ends for another reason."""
        if self._hidden is not None:
            text = (self._hidden.finish() + text).translate(self._unmarked)
        cut = self._shown.feed(text)
        return CutText(cut.text + self._shown.finish(), cut.stop)

    def _marked(self, tokenizer: Tokenizer, stop: str) -> str:
        parts, at = [], 0
        for start, end, token_id in tokenizer.special_spans(stop):
            mark = self._mark_of.setdefault(token_id, chr(0xD800 + len(self._mark_of)))
            parts += [stop[at:start], mark]
            at = end
        return "".join([*parts, stop[at:]])
