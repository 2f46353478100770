"""The weight files of a folder as one set of named tensors, read one at a time and accounted for.

Files are memory-mapped: a tensor is read when it is copied into its place, so loading needs about one copy of weights,
and a rank that takes its shards reads no others. Models are safetensors; only draft heads may be pickles, whose loaders
name the file.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from torch import Tensor

from kvasir_runtime.errors import CheckpointError
from kvasir_runtime.models.weight_file import WeightFile, open_weight_file

SAFETENSORS: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor, equal to the others'. Of a linear weight [out_features, in_features], dimension 0 is
    column-parallel and 1 row-parallel (Shoeybi et al. 2019, who write the weight transposed)."""

    dimension: int
    rank: int
    num_ranks: int
    may_be_uneven: bool = False
    """Whether the last parts may be smaller, or empty, where the size does not divide (a vocabulary)."""

    def part(self, whole: int) -> range:
        """Along the dimension. Raises CheckpointError when it does not divide."""
        if whole % self.num_ranks and not self.may_be_uneven:
            raise CheckpointError(
                f"dimension {self.dimension} of size {whole} does not divide into {self.num_ranks} equal parts; "
                "choose a tensor-parallel size that divides it"
            )
        size = -(-whole // self.num_ranks)
        return range(whole)[self.rank * size : (self.rank + 1) * size]

    def cut(self, tensor: Tensor) -> Tensor:
        """The part, as a view. Raises CheckpointError when the dimension does not divide."""
        part = self.part(tensor.shape[self.dimension])
        return tensor.narrow(self.dimension, part.start, len(part))


class Checkpoint:
    """Use as a context manager; tensors taken stay valid only until it is left."""

    def __init__(self, folder: Path, files: Sequence[str] = (SAFETENSORS,)) -> None:
        """Of `files` the first that is there is read; model.safetensors may be several, which its index names."""
        self.folder = folder
        self._files = files
        self._open = ExitStack()
        self._holders: dict[str, WeightFile] = {}  # tensor name -> open file that holds it
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        for path in _weight_files(self.folder, self._files):
            file = self._open.enter_context(open_weight_file(path))
            self._holders.update(dict.fromkeys(file.names(), file))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __contains__(self, name: object) -> bool:
        return name in self._holders

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self._holders[name].shape(name)

    def num_values(self, ignored: str | None = None) -> int:
        """Numbers in all tensors together, but for the one of that name."""
        return sum(math.prod(holder.shape(name)) for name, holder in self._holders.items() if name != ignored)

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None = None, rows: range | None = None) -> Tensor:
        """The tensor `name`, mapped from its file: nothing is read yet, and only what is used of it will be.

        `shape` is the whole tensor's; `rows` cuts out part of its first dimension, `shard` a rank's part of that.
        Raises CheckpointError unless the tensor is there with this shape and divides.
        """
        holder = self._holders.get(name)
        if holder is None:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} is missing, expected it with shape {list(shape)} as config.json says"
            )
        seen = holder.shape(name)
        if seen != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} has shape {list(seen)}, expected {list(shape)} as config.json says"
            )
        cut = [range(size) for size in shape]
        if rows is not None:
            cut[0] = rows
        if shard is not None:
            cut[shard.dimension] = self._part(name, cut[shard.dimension], shard)
        self._taken.add(name)
        return holder.read(name, tuple(slice(part.start, part.stop) for part in cut))

    def _part(self, name: str, whole: range, shard: Shard) -> range:
        try:
            part = shard.part(len(whole))
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: tensor {name!r} cannot be sharded: {error}") from error
        return whole[part.start : part.stop]

    def leave(self, names: Iterable[str]) -> None:
        """Other ranks take these tensors, and check them."""
        self._taken.update(names)

    def check_all_taken(self, ignored: Iterable[str], elsewhere: Iterable[str] = ()) -> None:
        """Raise CheckpointError when tensors were never asked for: the architecture is not the one that was built.

        `ignored` are ends of names that may be left over, `elsewhere` modules that other ranks take, and check.
        """
        endings, beginnings = tuple(ignored), tuple(f"{module}." for module in elsewhere)
        left = sorted(
            name
            for name in self._holders.keys() - self._taken
            if not name.endswith(endings) and not name.startswith(beginnings)
        )
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{self.folder}: unexpected tensors {', '.join(left[:5])}{more}; expected none that the "
                "architecture in config.json does not use"
            )


def _weight_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """The first of `names` that is there; in place of model.safetensors those that its index names."""
    index = folder / f"{SAFETENSORS}.index.json"
    for name in names:
        if name == SAFETENSORS and index.exists():
            return _indexed_files(index)
        if (folder / name).exists():
            return [folder / name]
    others = [name for name in names if name != SAFETENSORS]
    if others:
        raise CheckpointError(
            f"{folder} holds none of {SAFETENSORS}, {index.name}, {', '.join(others)}: download it again"
        )
    raise CheckpointError(
        f"{folder} holds neither {SAFETENSORS} nor {index.name}; only safetensors checkpoints are served: "
        "convert others with safetensors.torch.save_file"
    )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """File of each tensor."""


def _indexed_files(index: Path) -> list[Path]:
    folder = index.parent
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error}; download it again") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: {index.name} names {', '.join(missing)}, which is not there; download it again"
        )
    if others := [name for name in names if not name.endswith(".safetensors")]:
        raise CheckpointError(f"{folder}: {index.name} names {', '.join(others)}, expected safetensors files")
    return [folder / name for name in names]
