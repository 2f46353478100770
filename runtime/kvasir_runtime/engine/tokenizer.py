"""Text to tokens and back, in an API process.

`Tokenizer` reads tokenizer.json with the `tokenizers` library alone. Importing that takes 0.3 s and 28 MB, importing
transformers' AutoTokenizer 11 s and 560 MB (it brings torch), and both run the same Rust code. A folder without
tokenizer.json is converted once by transformers in a child process.

The tokens of a sequence become text as they come: each costs the same however long the text has become. `TextStream`s
turn token ids into text and never give out half a character; `StopStrings` holds back what may yet become a stop
string; `Detokenizer` joins both for one request. The texts given out add up to what decoding all tokens at once gives,
but where byte tokens are no valid UTF-8: there the valid bytes before are given out as text. A stream and a whole
answer go through the same code, so they are equal.
"""

import codecs
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers.processors import TemplateProcessing

from kvasir_runtime.checkpoint_json import read_json_object
from kvasir_runtime.errors import ModelLoadError

CONVERSION = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1]).backend_tokenizer.save(sys.argv[2])
"""
CONVERSION_SECONDS = 300
CONVERTIBLE = ("*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files that transformers makes a tokenizer of."""


class Tokenizer:
    """Text to token ids and back. Thread-safe; `encode` releases the interpreter's lock."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
        """`settings` is the content of tokenizer_config.json."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.settings = settings
        self.special_tokens = _special_tokens(settings)
        """Name (`bos_token`, `eos_token`, ...) -> text, as chat templates use them."""
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        _apply_bos_and_eos_settings(backend, settings, self.special_tokens)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Raises ModelLoadError when the folder holds no tokenizer that can be read."""
        settings_file = folder / "tokenizer_config.json"
        settings = read_json_object(settings_file) if settings_file.exists() else {}
        file = folder / "tokenizer.json"
        if file.exists():
            return cls(_read_backend(file), settings)
        with tempfile.TemporaryDirectory() as scratch:
            return cls(_read_backend(_convert(folder, Path(scratch) / "tokenizer.json")), settings)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        eos_token = self.special_tokens.get("eos_token")
        return None if eos_token is None else self._backend.token_to_id(eos_token)

    @property
    def adds_bos(self) -> bool:
        """Whether special tokens of a text begin with the beginning-of-sequence token."""
        bos_token = self.special_tokens.get("bos_token")
        return bos_token is not None and self._backend.token_to_id(bos_token) in self.encode(
            "", add_special_tokens=True
        )

    def to_json(self) -> str:
        """A tokenizer.json that makes the same token ids by itself."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling; empty for ids beyond it."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, which may be a part of a character."""
        if self.bytes_by_id is not None:
            return self.bytes_by_id[token_id] if token_id < len(self.bytes_by_id) else b""
        token = self.token(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def bytes_by_id(self) -> list[bytes] | None:
        """Bytes of each token, where decoding is nothing but their concatenation (byte-level BPE); else None."""
        if not isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return None
        byte_of = _byte_alphabet()
        bytes_by_id = [b""] * (max(self._vocab.values(), default=-1) + 1)
        for token, token_id in self._vocab.items():
            bytes_by_id[token_id] = _bytes_of(token, byte_of)
        return bytes_by_id

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """No token stands for more characters of a prompt; None where the tokenizer may drop or merge text."""
        normalizer, model = self._backend.normalizer, self._backend.model
        keeps_all_text = self.bytes_by_id is not None or getattr(model, "byte_fallback", False)
        if not keeps_all_text or not (normalizer is None or type(normalizer).__name__ in ("NFC", "Prepend", "Replace")):
            return None
        factor = 1 if normalizer is None else 4  # NFC composes up to four characters into one
        return factor * max((len(token) for token in self._vocab), default=1)

    @property
    def _vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file} is no tokenizer that the tokenizers library can read: {error}") from error


def _convert(folder: Path, target: Path) -> Path:
    """In a child process, so that this one stays free of transformers and torch."""
    if not any(file for pattern in CONVERTIBLE for file in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} holds no tokenizer: neither tokenizer.json nor {', '.join(CONVERTIBLE)}; "
            "name another folder with --tokenizer"
        )
    command = [sys.executable, "-c", CONVERSION, str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_SECONDS, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelLoadError(
            f"{folder} holds no tokenizer.json, and transformers could not make one from its other files: {reason}; "
            "add tokenizer.json or name another folder with --tokenizer"
        )
    return target


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _apply_bos_and_eos_settings(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """`add_bos_token`/`add_eos_token` in tokenizer_config.json overrule tokenizer.json, as in transformers."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    bos = special_tokens.get("bos_token") if settings.get("add_bos_token") else None
    eos = special_tokens.get("eos_token") if settings.get("add_eos_token") else None
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    known = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    if all(token_id is not None for _, token_id in known):
        backend.post_processor = TemplateProcessing(single=single, special_tokens=known)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2, Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _bytes_of(token: str, byte_of: dict[str, int]) -> bytes:
    """An added token with a character outside the alphabet stands for itself."""
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:
        return token.encode()


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING_TOKENS = 8
"""A character has at most four bytes and each token at least one, so more pending tokens than this are no character."""


class TextStream(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    def finish(self) -> str:
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

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


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

    def finish(self) -> str:
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

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._stream: TextStream = (
            ByteLevelStream(tokenizer.bytes_by_id) if tokenizer.bytes_by_id is not None else WindowStream(tokenizer)
        )
        self._skipped_ids = tokenizer.special_ids if options.skip_special_tokens else frozenset[int]()
        self._stop_strings = StopStrings(options.stop, options.include_stop_str_in_output) if options.stop else None
        self._include_stop_token = options.include_stop_str_in_output
        self._num_tokens_before_stop = options.min_tokens

    def feed(self, token_ids: Sequence[int]) -> NewText:
        new_text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text = "" if token_id in self._skipped_ids else self._stream.feed(token_id)
            self._num_tokens_before_stop -= 1
            if self._stop_strings is None or self._num_tokens_before_stop >= 0:
                new_text += text
                continue
            text, stop = self._stop_strings.feed(text) if text else CutText("", None)
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
        rest = CutText(self._stream.finish(), None)
        if self._stop_strings is not None:
            rest = self._stop_strings.feed(rest.text)
            rest = CutText(rest.text + self._stop_strings.finish(), rest.stop)
        return NewText(new.text + rest.text, rest.stop, len(token_ids))
