"""Text to tokens and back, in an API process.

`Tokenizer` reads tokenizer.json with the `tokenizers` library alone. Importing that takes 0.3 s and 28 MB, importing
transformers' AutoTokenizer 5 to 11 s and 560 MB (it brings torch), and both run the same Rust code. So what else
transformers reads of a checkpoint is read here, in its order; a folder without tokenizer.json is converted by
transformers itself, once, in a child process.
"""

import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from kvasir_runtime.checkpoint_json import read_json_object_if_there, shortened
from kvasir_runtime.config import ModelConfig
from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.structured.vocabulary import Vocabulary

CONVERSION = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[2])
tokenizer.backend_tokenizer.save(sys.argv[2] + "/tokenizer.json")
"""
CONVERSION_SECONDS = 300
CONVERTIBLE = ("*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files that transformers makes a tokenizer of."""
Side = Literal["left", "right"]
_ADDS = ("add_bos_token", "add_eos_token")
Settings = dict[str, Any]
"""tokenizer_config.json, with what older checkpoints keep in files beside it."""


class Tokenizer:
    """Text to token ids and back. Thread-safe; `encode` releases the interpreter's lock."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Settings) -> None:
        """Raises ModelLoadError for settings that name no tokens where they should."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.settings = settings
        named, others = _special_tokens(settings)
        self.special_tokens = {name: token.content for name, token in named.items()}
        """Name (`bos_token`, `eos_token`, ...) -> text, as chat templates use them."""
        tokens = [*_added_tokens(settings), *named.values(), *others]
        known = backend.get_added_tokens_decoder()
        texts = {token.content for token in known.values()}
        backend.add_tokens([token for token in tokens if token.content and token.content not in texts])
        special = {token.content for token in (*known.values(), *tokens) if token.special}
        self.special_ids = frozenset(i for text in special if (i := backend.token_to_id(text)) is not None)
        _apply_bos_and_eos_settings(backend, settings, self.special_tokens)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Raises ModelLoadError when the folder holds no tokenizer that can be read."""
        settings, file = _read_settings(folder), folder / "tokenizer.json"
        if file.exists():
            return cls(_read_backend(file), settings)
        with tempfile.TemporaryDirectory() as scratch:
            converted = _convert(folder, Path(scratch))
            given = {key: value for key, value in settings.items() if value is not None}
            return cls(_read_backend(converted / "tokenizer.json"), _read_settings(converted) | given)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        eos_token = self.special_tokens.get("eos_token")
        return None if eos_token is None else self._backend.token_to_id(eos_token)

    def to_json(self) -> str:
        """A tokenizer.json that makes the same token ids by itself."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_within(
        self, first: str, second: str | None, most_tokens: int | None, side: Side, *, add_special_tokens: bool
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of two that are compared, cut at that side to so many tokens (the longer of two
        first; None: whole), special ones included; and where the second begins, if the model is told."""
        texts = [first] if second is None else [first, second]
        encodings = [self._backend.encode(text, add_special_tokens=False) for text in texts]
        if most_tokens is not None:
            num_special = self._backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            lengths = _lengths_within([len(each.ids) for each in encodings], max(0, most_tokens - num_special))
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length, direction=side)
        pair = encodings[1] if len(encodings) > 1 else None
        whole = self._backend.post_process(encodings[0], pair, add_special_tokens=add_special_tokens)
        return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else None

    def beginning(self, text: str, most_tokens: int) -> str:
        """Of a text, as far as its first tokens stand for it."""
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= most_tokens else text[: offsets[most_tokens - 1][1]]

    def decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Where special tokens stand in a text: start, end, id."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        tokens = zip(encoding.offsets, encoding.ids, strict=True)
        return [(start, end, token_id) for (start, end), token_id in tokens if token_id in self.special_ids]

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


def _lengths_within(lengths: list[int], most: int) -> list[int]:
    """So that their sum is no more: the shorter of two keeps up to half, as in transformers."""
    if sum(lengths) <= most:
        return lengths
    if len(lengths) == 1:
        return [most]
    first, second = lengths
    kept = min(first, second, most // 2)
    return [kept, most - kept] if first <= second else [most - kept, kept]


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


def _read_settings(folder: Path) -> Settings:
    """The files beside tokenizer_config.json count, as in transformers, where that says nothing of added tokens."""
    settings = read_json_object_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json_object_if_there(folder / "special_tokens_map.json")
        named, others = _special_tokens(settings)
        special = {token.content for token in (*named.values(), *others)}
        settings["added_tokens_decoder"] = {
            token_id: {"content": text, "special": text in special, "normalized": text not in special}
            for text, token_id in read_json_object_if_there(folder / "added_tokens.json").items()
        }
    return settings


def _added_tokens(settings: Settings) -> list[AddedToken]:
    """In the order of their ids, which are those that they get where tokenizer.json lacks them."""
    given = settings.get("added_tokens_decoder") or {}
    try:
        by_id = {int(token_id): value for token_id, value in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"added_tokens_decoder in tokenizer_config.json has no ids as keys: {error}") from error
    return [_token(by_id[token_id]) for token_id in sorted(by_id)]


def _special_tokens(settings: Settings) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Those with a name, which chat templates may print, and the others."""
    extra = settings.get("extra_special_tokens") or []
    others = [extra, settings.get("additional_special_tokens") or []]
    by_name = {
        name: value
        for name, value in settings.items()
        if name.endswith("_token") and name not in _ADDS and _is_token(value)
    }
    if isinstance(extra, dict):
        by_name, others = by_name | extra, others[1:]
    if not all(isinstance(tokens, list) for tokens in others):
        raise ModelLoadError(f"a tokenizer's settings have {shortened(others)} for lists of special tokens")
    named = {name: _token(value, special=True) for name, value in by_name.items()}
    return named, [_token(value, special=True) for tokens in others for value in tokens]


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token(value: Any, **flags: bool) -> AddedToken:
    """From its text, or from an object that has its flags too."""
    fields: dict[str, Any] = {"content": value} if isinstance(value, str) else value
    try:
        return AddedToken(**{key: field for key, field in fields.items() if key not in ("id", "__type")} | flags)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"a tokenizer's settings have {shortened(value)} for a token: {error}") from error


def _apply_bos_and_eos_settings(
    backend: tokenizers.Tokenizer, settings: Settings, special_tokens: dict[str, str]
) -> None:
    """`add_bos_token` and `add_eos_token` overrule tokenizer.json, each where it is given."""
    adds = {name: settings.get(name) for name in _ADDS}
    for name, value in adds.items():
        if value not in (None, True, False):
            raise ModelLoadError(f"a tokenizer's settings have {shortened(value)} for {name}, expected true or false")
    if not any(value is not None for value in adds.values()):
        return
    added = backend.encode("", add_special_tokens=True).tokens

    def wanted(name: str) -> dict[str, str]:
        token, is_wanted = special_tokens.get(name), adds[f"add_{name}"]
        return {name: token} if token and (token in added if is_wanted is None else is_wanted) else {}

    bos, eos = wanted("bos_token"), wanted("eos_token")
    # By names of their own: a token's text may have a space or a colon, or be one of a template's variables.
    backend.post_processor = TemplateProcessing(
        single=" ".join([*bos, "$A", *eos]),
        special_tokens=[
            {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]} for name, token in (bos | eos).items()
        ],
    )


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


def load_vocabulary(model: ModelConfig, vocab_size: int) -> Vocabulary:
    """That a rank's grammars are followed by, for a model with so many logits. Raises ModelLoadError."""
    return Vocabulary(Tokenizer.load(Path(model.tokenizer or model.model)), vocab_size)
