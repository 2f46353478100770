"""Loads the smallest modules of a model, each weight copied once: linear layers, norms, tables, rotations.

Whatever builds a model uses it: the decoder, and drafts or heads whose checkpoints have names of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.kernels.grouped_linear import GroupedWeight
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Checkpoint, Shard
from kvasir_runtime.models.decoder import Norm
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.rope import RopeOptions, rope_tables
from kvasir_runtime.models.weight_format import ExpertTensors, PlainFormat, select_format, take_floats


class RopeTables:
    """One pair of tables for each distinct rope, shared by its layers."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._num_positions = num_positions
        self._device = device
        self._made: list[tuple[RopeOptions, tuple[Tensor, Tensor]]] = []

    def of(self, rope: RopeOptions) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [num_positions, rotary_dim]. Raises ModelLoadError."""
        for options, tables in self._made:
            if options == rope:
                return tables
        self._made.append((rope, rope_tables(rope, self._num_positions, self._device)))
        return self._made[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoader:
    """All methods raise CheckpointError when a tensor is missing, of another shape or of an unknown type."""

    checkpoint: Checkpoint
    placement: Placement
    weight_format: PlainFormat
    ropes: RopeTables
    norm_eps: float
    norm_weight_offset: float

    def linear(
        self,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        *,
        has_bias: bool = False,
        shard: Shard | Sequence[Shard] | None = None,
    ) -> Linear:
        """One layer from the checkpoint's modules `names`, their outputs side by side (see PlainFormat.load).

        Every linear layer of a model is made here, under the names by which adapters know it.
        """
        load = self.weight_format.load
        return load(self.checkpoint, names, out_features, in_features, has_bias=has_bias, shard=shard)

    def experts(self, tensors: ExpertTensors, local: range, shard: Shard | None) -> GroupedWeight:
        """One kind of weight of a mixture's experts, of those in `local` (see PlainFormat.load_experts)."""
        return self.weight_format.load_experts(self.checkpoint, tensors, local, shard)

    def norm(self, name: str, size: int, shard: Shard | None = None) -> Norm:
        """The offset of (1 + w) norms is added in float32, and stays in it: bf16 would round w away."""
        weight = take_floats(self.checkpoint, f"{name}.weight", (size,), shard)
        dtype = torch.float32 if self.norm_weight_offset else self.placement.dtype
        own = (weight.float() + self.norm_weight_offset).to(device=self.placement.device, dtype=dtype, copy=True)
        return Norm(self.placement.ops, own, self.norm_eps)

    def table(self, name: str, shape: tuple[int, int], shard: Shard | None = None) -> Tensor:
        """An embedding's rows, in memory of our own."""
        rows = take_floats(self.checkpoint, f"{name}.weight", shape, shard)
        return rows.to(device=self.placement.device, dtype=self.placement.dtype, copy=True)


def make_module_loader(
    checkpoint: Checkpoint, options: DecoderOptions, placement: Placement, num_positions: int
) -> ModuleLoader:
    """For the modules of a model with these options; `num_positions` sizes its rope tables. Raises ModelLoadError."""
    return ModuleLoader(
        checkpoint=checkpoint,
        placement=placement,
        weight_format=select_format(checkpoint, options, placement),
        ropes=RopeTables(num_positions, placement.device),
        norm_eps=options.norm_eps,
        norm_weight_offset=options.norm_weight_offset,
    )
