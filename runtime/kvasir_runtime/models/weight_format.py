"""How a checkpoint keeps the weights of linear layers: plain floats, or one day quantised.

A format is a class with `load` and its line in `select_format`; the modules above it see only a `LinearWeight`. What
cannot be read is refused here, and nowhere else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvasir_runtime.errors import CheckpointError, ModelLoadError
from kvasir_runtime.kernels.linear_weight import LinearWeight
from kvasir_runtime.models.checkpoint import Checkpoint, Shard
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightFormat(Protocol):
    def load(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        *,
        has_bias: bool,
        shard: Shard | None = None,
    ) -> LinearWeight:
        """The checkpoint's modules `names`, each of so many `out_features`, as one layer: their outputs side by side.

        A name that comes again continues in the same tensors. Sizes are those of the whole layer; with a `shard` the
        rank's part of each module is joined. A row-parallel bias goes to rank 0 alone, since the ranks' results are
        added. Raises CheckpointError.
        """


def select_format(checkpoint: Checkpoint, options: DecoderOptions, placement: Placement) -> WeightFormat:
    """The format that the checkpoint declares. Raises ModelLoadError for one that is not known."""
    if options.quantization is not None:
        method = options.quantization.get("quant_method", "without a quant_method")
        raise ModelLoadError(
            f"{checkpoint.folder}: quantized checkpoints are not supported, and config.json declares a "
            f"quantization_config ({method}); use the model in bf16, fp16 or fp32"
        )
    return PlainFormat(placement)


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Floats `NAME.weight` [out_features, in_features] and `NAME.bias` [out_features], cast to the model's type."""

    placement: Placement

    def load(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        *,
        has_bias: bool,
        shard: Shard | None = None,
    ) -> LinearWeight:
        parts = list(_parts(names, out_features))
        weight = self._joined(
            take_floats(checkpoint, f"{part.name}.weight", (part.of, in_features), shard, part.rows) for part in parts
        )
        bias = self._bias(checkpoint, parts, shard) if has_bias else None
        return self.placement.make_weight(weight, bias)

    def _bias(self, checkpoint: Checkpoint, parts: Sequence["_Part"], shard: Shard | None) -> Tensor | None:
        own = shard if shard is not None and shard.dimension == 0 else None
        bias = self._joined(take_floats(checkpoint, f"{part.name}.bias", (part.of,), own, part.rows) for part in parts)
        is_added_by_rank_0 = shard is not None and shard.dimension == 1 and shard.rank > 0
        return None if is_added_by_rank_0 else bias

    def _joined(self, tensors: Iterator[Tensor]) -> Tensor:
        """Laid end to end in memory of our own; each is read from its file once, straight into its place."""
        mapped = list(tensors)
        num_rows = sum(len(tensor) for tensor in mapped)
        joined = torch.empty((num_rows, *mapped[0].shape[1:]), dtype=self.placement.dtype, device=self.placement.device)
        start = 0
        for tensor in mapped:
            joined[start : start + len(tensor)].copy_(tensor)
            start += len(tensor)
        return joined


def take_floats(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], shard: Shard | None = None, rows: range | None = None
) -> Tensor:
    """`Checkpoint.take` of a tensor that must hold plain floats. Raises CheckpointError."""
    tensor = checkpoint.take(name, shape, shard, rows)
    if tensor.dtype not in _FLOAT_TYPES:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name!r} has type {tensor.dtype}, expected float32, bfloat16 or float16: "
            "quantized checkpoints are not supported"
        )
    return tensor


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    rows: range
    """Of the tensor that holds this part."""
    of: int
    """Rows of that tensor in all."""


def _parts(names: Sequence[str], out_features: Sequence[int]) -> Iterator[_Part]:
    """Where each part lies in the tensor of its name."""
    totals: dict[str, int] = {}
    starts: list[int] = []
    for name, size in zip(names, out_features, strict=True):
        starts.append(totals.get(name, 0))
        totals[name] = starts[-1] + size
    for name, size, start in zip(names, out_features, starts, strict=True):
        yield _Part(name, range(start, start + size), totals[name])
