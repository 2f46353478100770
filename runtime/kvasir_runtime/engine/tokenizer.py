"""The tokenizer of one model, in an API process.

It reads tokenizer.json with the `tokenizers` library alone. Importing that takes 0.3 s and 28 MB, importing
transformers' AutoTokenizer 11 s and 560 MB (it brings torch), and both run the same Rust code. A folder without
tokenizer.json is converted once by transformers in a child process.
"""

import json
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

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
        settings = _read_json(settings_file) if settings_file.exists() else {}
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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds a {type(content).__name__}, but a JSON object was expected")
    return content


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
