"""How a checkpoint keeps the weights of linear layers: plain floats, or one day quantised.

A format is a class with these methods and its line in `select_format`; the modules above it see only a `Linear`. What
cannot be read is refused here, and nowhere else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.checkpoint_json import shortened
from kvasir_runtime.errors import CheckpointError, ModelLoadError
from kvasir_runtime.kernels.grouped_linear import GroupedWeight
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Checkpoint, Shard
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """Where a checkpoint keeps one kind of weight of a layer's experts, its parts side by side."""

    num_experts: int
    names: Callable[[int], Sequence[str]] | str
    """Modules of an expert's parts by its index; or the one tensor [num_experts, out_features, in_features] of all."""
    out_features: Sequence[int]
    """Of each part."""
    in_features: int


def select_format(checkpoint: Checkpoint, options: DecoderOptions, placement: Placement) -> "PlainFormat":
    """The format that the checkpoint declares. Raises ModelLoadError for one that is not known."""
    if options.quantization is not None:
        method = options.quantization.get("quant_method", "without a quant_method")
        raise ModelLoadError(
            f"{checkpoint.folder}: quantized checkpoints are not supported, and config.json declares a "
            f"quantization_config ({shortened(method)}); use the model in bf16, fp16 or fp32, and where its weights "
            "are that already, without quantization_config in config.json"
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
        shard: Shard | Sequence[Shard] | None = None,
    ) -> Linear:
        """The checkpoint's modules `names`, each of so many `out_features`, as one layer: their outputs side by side.

        A name that comes again continues in the same tensors. Sizes are those of the whole layer; with a `shard` (or
        one for each name) the rank's part of each module is joined. A row-parallel bias goes to rank 0 alone, since the
        ranks' results are added. Raises CheckpointError.
        """
        shards = shard if isinstance(shard, Sequence) else [shard] * len(names)
        parts = list(_parts(names, out_features, shards))
        weight = self._joined(
            take_floats(checkpoint, f"{part.name}.weight", (part.of, in_features), part.shard, part.rows)
            for part in parts
        )
        bias = self._bias(checkpoint, parts) if has_bias else None
        return self.placement.make_weight(weight, bias)

    def load_experts(
        self, checkpoint: Checkpoint, tensors: ExpertTensors, local: range, shard: Shard | None
    ) -> GroupedWeight:
        """The weights of the experts `local`, of each the rank's part of every part; other experts' are not read.

        Raises CheckpointError.
        """
        if not isinstance(tensors.names, str):
            others = (tensors.names(expert) for expert in range(tensors.num_experts) if expert not in local)
            checkpoint.leave(f"{name}.weight" for names in others for name in names)
        weights = (self._joined(_expert_parts(checkpoint, tensors, expert, shard)) for expert in local)
        return self.placement.make_grouped_weight(weights, len(local))

    def _bias(self, checkpoint: Checkpoint, parts: Sequence["_Part"]) -> Tensor | None:
        bias = self._joined(
            take_floats(checkpoint, f"{part.name}.bias", (part.of,), part.bias_shard, part.rows) for part in parts
        )
        return None if any(part.is_bias_of_rank_0 for part in parts) else bias

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


def _expert_parts(checkpoint: Checkpoint, tensors: ExpertTensors, expert: int, shard: Shard | None) -> Iterator[Tensor]:
    """The rank's part of each part of one expert's weight."""
    if not isinstance(tensors.names, str):
        for name, size in zip(tensors.names(expert), tensors.out_features, strict=True):
            yield take_floats(checkpoint, f"{name}.weight", (size, tensors.in_features), shard)
        return
    shape = (tensors.num_experts, sum(tensors.out_features), tensors.in_features)
    whole = take_floats(checkpoint, tensors.names, shape, rows=range(expert, expert + 1))[0]
    for part in torch.split_with_sizes(whole, list(tensors.out_features)):
        yield part if shard is None else shard.cut(part)


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    rows: range
    """Of the tensor that holds this part."""
    of: int
    """Rows of that tensor in all."""
    shard: Shard | None

    @property
    def bias_shard(self) -> Shard | None:
        return self.shard if self.shard is not None and self.shard.dimension == 0 else None

    @property
    def is_bias_of_rank_0(self) -> bool:
        """Added there, and not here: the ranks' results are summed."""
        return self.shard is not None and self.shard.dimension == 1 and self.shard.rank > 0


def _parts(names: Sequence[str], out_features: Sequence[int], shards: Sequence[Shard | None]) -> Iterator[_Part]:
    """Where each part lies in the tensor of its name."""
    totals: dict[str, int] = {}
    starts: list[int] = []
    for name, size in zip(names, out_features, strict=True):
        starts.append(totals.get(name, 0))
        totals[name] = starts[-1] + size
    for name, size, start, shard in zip(names, out_features, starts, shards, strict=True):
        yield _Part(name, range(start, start + size), totals[name], shard)
