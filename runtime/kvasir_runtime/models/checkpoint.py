"""The safetensors files of a folder as one set of named tensors, read one at a time and accounted for.

Files are memory-mapped: a tensor is read when it is copied into its place, so loading needs about one copy of weights.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvasir_runtime.errors import CheckpointError

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """Use as a context manager; tensors taken stay valid only until it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}  # tensor name -> open file that holds it
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        for path in _weight_files(self._folder):
            try:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} is not a readable safetensors file: {error}; download it again"
                ) from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, mapped from its file. Raises CheckpointError unless it is there with this shape."""
        if name not in self._handles:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} is missing, expected it with shape {list(shape)} as config.json says"
            )
        handle = self._handles[name]
        seen = tuple(handle.get_slice(name).get_shape())
        if seen != shape:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} has shape {list(seen)}, expected {list(shape)} as config.json says"
            )
        tensor: Tensor = handle.get_tensor(name)
        if tensor.dtype not in _FLOAT_TYPES:
            raise CheckpointError(
                f"{self._folder}: tensor {name!r} has type {tensor.dtype}, expected float32, bfloat16 or float16"
            )
        self._taken.add(name)
        return tensor

    def check_all_taken(self, ignored: Iterable[str]) -> None:
        """Raise CheckpointError when tensors were never asked for: the architecture is not the one that was built.

        `ignored` are ends of names that may be left over.
        """
        endings = tuple(ignored)
        left = sorted(name for name in self._handles.keys() - self._taken if not name.endswith(endings))
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{self._folder}: unexpected tensors {', '.join(left[:5])}{more}; expected none that the "
                "architecture in config.json does not use"
            )


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or those that the index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise CheckpointError(
                f"{folder} holds neither model.safetensors nor {index.name}; only safetensors checkpoints are served"
            )
        return [single]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index with a weight_map: {error!r}") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: {index.name} names {', '.join(missing)}, which is not there; download it again"
        )
    return [folder / name for name in names]
