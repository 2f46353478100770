"""A file of named tensors: safetensors, or what torch.save wrote of a state dict, as many draft heads are published.

Both are memory-mapped: a tensor is read when it is copied into its place. A pickle can run code, so nothing but plain
tensors is unpickled.
"""

import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from kvasir_runtime.errors import CheckpointError

_ADVICE = "convert it with safetensors.torch.save_file where it is trusted"


class WeightFile(Protocol):
    """Valid until it is closed, and so are the tensors."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, parts: tuple[slice, ...]) -> Tensor:
        """Part of the tensor, one slice a dimension; of a scalar all."""


@contextmanager
def open_weight_file(path: Path) -> Iterator[WeightFile]:
    """`.safetensors`, or by any other name a file of torch.save. Raises CheckpointError."""
    if path.suffix != ".safetensors":
        yield _PickledFile(_unpickle(path))
        return
    try:
        opened = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}; download it again") from error
    with opened as handle:
        yield _SafetensorsFile(handle)


@dataclass(frozen=True, slots=True)
class _SafetensorsFile:
    handle: Any

    def names(self) -> Collection[str]:
        return list(self.handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(name).get_shape())

    def read(self, name: str, parts: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self.handle.get_slice(name)[parts] if parts else self.handle.get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class _PickledFile:
    tensors: Mapping[str, Tensor]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, parts: tuple[slice, ...]) -> Tensor:
        return self.tensors[name].detach()[parts]  # some are parameters


def _unpickle(path: Path) -> Mapping[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        foreign = ", ".join(_foreign_objects(path)) or "what cannot be told"
        raise CheckpointError(
            f"{path} is not loaded: it holds more than tensors ({foreign}), and such a pickle can run code; {_ADVICE}"
        ) from error
    except Exception as error:  # a damaged pickle raises whatever it comes to
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is not a readable file of torch.save in its zip format: {reason}; download it again, or {_ADVICE}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a state dict; {_ADVICE}")
    for name, value in content.items():
        if not (isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} under {name!r}, expected dense tensors by name; {_ADVICE}"
            )
    return content


def _foreign_objects(path: Path) -> list[str]:
    try:
        return get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # as above
        return []
