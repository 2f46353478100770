"""Which files of a repository an engine needs: safetensors, configuration, tokenizer, chat templates.

Many draft heads are published as a pickle alone, which may have the name of a whole model's. No listing says which it
is; but heads use their target's tokenizer, and no model is served without one.
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from kvasir_runtime.errors import ModelNotFoundError
from kvasir_runtime.model_sources.source import RemoteFile

# Beside the weights. Sentencepiece's and tiktoken's vocabularies have endings of their own.
_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
# Transformers keeps further chat templates there; other folders hold other formats (onnx/, original/).
_FOLDERS: Final = frozenset({"", "additional_chat_templates"})
# The sentence-transformers library keeps what follows a model in these: 1_Pooling, 2_Dense.
_MODULE: Final = re.compile("[0-9]+_[A-Za-z]+")
# The same weights once more, as their authors trained them.
_DUPLICATES: Final = "consolidated"
# As EAGLE's and Medusa's authors name them (speculative/eagle_heads.py, speculative/medusa.py); whole models the first.
_EAGLE_PICKLE: Final = "pytorch_model.bin"
_PICKLES: Final = frozenset({_EAGLE_PICKLE, "medusa_lm_head.pt"})
_TOKENIZERS: Final = ("tokenizer", "vocab", "merges")


def serving_files(files: Iterable[RemoteFile], address: str) -> list[RemoteFile]:
    """The smallest first, so that what is wrong with a source shows before the weights.

    Raises ModelNotFoundError where there is no configuration, or neither safetensors nor a draft head.
    """
    there = list(files)
    candidates = [file for file in there if may_be_served(file.path)]
    left = _left_pickles({file.path for file in candidates})
    chosen = [file for file in candidates if file.path not in left]
    paths = {file.path for file in chosen}
    lacking = [] if "config.json" in paths else ["config.json"]
    lacking += [] if _has_safetensors(paths) or paths & _PICKLES else ["*.safetensors"]
    if lacking:
        raise ModelNotFoundError(
            f"{address} has no {' and no '.join(lacking)} among its {len(there)} files{_some(there)}: "
            "only checkpoints in Hugging Face's format with safetensors are served, and draft heads as "
            "medusa_lm_head.pt, or pytorch_model.bin without a tokenizer"
        )
    return sorted(chosen, key=lambda file: (file.size_bytes, file.path))


def may_be_served(name: str) -> bool:
    """`name` is its path in the repository. Whether a pickle is, the other files decide."""
    path = PurePosixPath(name)
    folder = "" if path.parent == PurePosixPath(".") else str(path.parent)
    if not (folder in _FOLDERS or _MODULE.fullmatch(folder)) or path.name.startswith("."):
        return False
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return not path.name.startswith(_DUPLICATES)
    return path.suffix in _SUFFIXES or name in _PICKLES


def _left_pickles(paths: set[str]) -> frozenset[str]:
    """Those that are the same weights once more, or a whole model's."""
    if _has_safetensors(paths):
        return _PICKLES
    has_tokenizer = any(path.startswith(_TOKENIZERS) or path.endswith((".model", ".tiktoken")) for path in paths)
    return frozenset({_EAGLE_PICKLE}) if has_tokenizer else frozenset()


def _has_safetensors(paths: Iterable[str]) -> bool:
    """Of the model itself."""
    return any(path.endswith(".safetensors") and "/" not in path for path in paths)


def _some(files: list[RemoteFile]) -> str:
    """The largest ones, which tell what it holds instead."""
    largest = sorted(files, key=lambda file: -file.size_bytes)[:3]
    return f" ({', '.join(file.path for file in largest)}, ...)" if largest else ""
