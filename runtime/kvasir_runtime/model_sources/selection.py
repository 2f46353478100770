"""Which files of a repository an engine needs: safetensors, configuration, tokenizer, chat templates."""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from kvasir_runtime.errors import ModelNotFoundError
from kvasir_runtime.model_sources.source import RemoteFile

# Beside the weights. Sentencepiece's and tiktoken's vocabularies have endings of their own.
_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
# Transformers keeps further chat templates there; other folders hold other formats (onnx/, original/).
_FOLDERS: Final = frozenset({"", "additional_chat_templates"})
# The same weights once more, as their authors trained them.
_DUPLICATES: Final = "consolidated"


def serving_files(files: Iterable[RemoteFile], address: str) -> list[RemoteFile]:
    """The smallest first, so that what is wrong with a source shows before the weights.

    Raises ModelNotFoundError where there is no configuration, or no safetensors.
    """
    there = list(files)
    chosen = [file for file in there if is_served(file.path)]
    paths = {file.path for file in chosen}
    lacking = [] if "config.json" in paths else ["config.json"]
    lacking += [] if any(path.endswith(".safetensors") for path in paths) else ["*.safetensors"]
    if lacking:
        raise ModelNotFoundError(
            f"{address} has no {' and no '.join(lacking)} among its {len(there)} files{_some(there)}: "
            "only checkpoints in Hugging Face's format with safetensors are served"
        )
    return sorted(chosen, key=lambda file: (file.size_bytes, file.path))


def is_served(name: str) -> bool:
    """`name` is its path in the repository."""
    path = PurePosixPath(name)
    folder = "" if path.parent == PurePosixPath(".") else str(path.parent)
    if folder not in _FOLDERS or path.name.startswith("."):
        return False
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return not path.name.startswith(_DUPLICATES)
    return path.suffix in _SUFFIXES


def _some(files: list[RemoteFile]) -> str:
    """The largest ones, which tell what it holds instead."""
    largest = sorted(files, key=lambda file: -file.size_bytes)[:3]
    return f" ({', '.join(file.path for file in largest)}, ...)" if largest else ""
