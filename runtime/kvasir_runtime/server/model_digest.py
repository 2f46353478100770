"""Whether two replicas serve the same model: a digest of its configuration, its tokenizer and samples of its weights.

Whole checkpoints take minutes to read. Training changes nearly every weight, so a few blocks of each file tell models
apart that differ in nothing else.
"""

import hashlib
from pathlib import Path

from kvasir_runtime.errors import ModelLoadError

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096


def model_digest(folder: Path, tokenizer_folder: Path) -> str:
    """32 hex digits; files that a checkpoint does not have count as empty. Raises ModelLoadError."""
    try:
        return _digest(folder, tokenizer_folder)
    except OSError as error:
        raise ModelLoadError(
            f"cannot read {error.filename}: {error.strerror}; let the runtime's user read every file of the model"
        ) from error


def _digest(folder: Path, tokenizer_folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (folder / "config.json", *(tokenizer_folder / name for name in _TOKENIZER_FILES)):
        content = file.read_bytes() if file.exists() else b""
        digest.update(hashlib.sha256(content).digest())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(hashlib.sha256(_samples(file)).digest())
    return digest.hexdigest()[:32]


def _samples(file: Path) -> bytes:
    """The size, and blocks at equal distances."""
    size = file.stat().st_size
    parts = [size.to_bytes(8, "little")]
    with file.open("rb") as stream:
        for number in range(_SAMPLES_PER_FILE):
            stream.seek(size * number // _SAMPLES_PER_FILE)
            parts.append(stream.read(_SAMPLE_BYTES))
    return b"".join(parts)
