"""Builds an encoder, and what follows its pooling, from a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderLayer,
    LayerNorm,
    Mlp,
    Norm,
    SelfAttention,
    unchanged,
)
from kvasir_runtime.encoders.options import ACTIVATIONS, EncoderLayerOptions, EncoderNames, EncoderOptions
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.module_loader import RopeTables
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.weight_format import PlainFormat, take_floats
from kvasir_runtime.pooling.description import Embedding, PoolingDescription
from kvasir_runtime.pooling.head import Chain, Head, Layer, load_dense, load_linear

_LEFTOVERS = ("position_ids", "inv_freq")
"""Buffers that older checkpoints saved along with the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLoader:
    """All methods raise CheckpointError when a tensor is missing, of another shape or of an unknown type."""

    checkpoint: Checkpoint
    options: EncoderOptions
    names: EncoderNames
    placement: Placement
    ropes: RopeTables

    def encoder(self) -> Encoder:
        options, names = self.options, self.names
        prefix = self._prefix()
        encoder = Encoder(
            embeddings=Embeddings(
                words=self._table(f"{prefix}{names.embedding}", options.vocab_size),
                positions=self._optional_table(prefix, names.positions, options.num_positions),
                first_position=options.first_position,
                types=self._optional_table(prefix, names.types, options.num_types),
                norm=self._norm(f"{prefix}{names.embedding_norm}"),
            ),
            layers=tuple(
                self._layer(f"{prefix}{names.layers}.{index}", layer) for index, layer in enumerate(options.layers)
            ),
            final_norm=unchanged if names.final_norm is None else self._norm(f"{prefix}{names.final_norm}"),
        )
        unused = [*names.unused, *(f"{prefix}{name}" for name in names.unused)]
        self.checkpoint.check_all_taken(ignored=_LEFTOVERS, elsewhere=unused)
        return encoder

    def _prefix(self) -> str:
        """Before all names, where the checkpoint has a head besides."""
        prefix = f"{self.names.prefix}."
        return prefix if f"{prefix}{self.names.embedding}.weight" in self.checkpoint else ""

    def _layer(self, prefix: str, layer: EncoderLayerOptions) -> EncoderLayer:
        options, names = self.options, self.names
        hidden, inner = options.hidden_size, options.intermediate_size
        qkv, up = [f"{prefix}.{name}" for name in names.qkv], [f"{prefix}.{name}" for name in names.up]
        return EncoderLayer(
            attention=SelfAttention(
                qkv=self._linear(qkv, [hidden] * 3, hidden, has_bias=options.attention_bias),
                output=self._linear(
                    [f"{prefix}.{names.attention_output}"], [hidden], hidden, has_bias=options.attention_bias
                ),
                num_heads=options.num_heads,
                half_window=layer.half_window,
                rope=None if layer.rope is None else self.ropes.of(layer.rope),
            ),
            attention_norm=self._norm(f"{prefix}.{names.attention_norm}") if layer.norms_input else unchanged,
            mlp=Mlp(
                up=self._linear(up, [inner] * len(up), hidden, has_bias=options.mlp_bias),
                down=self._linear([f"{prefix}.{names.down}"], [hidden], inner, has_bias=options.mlp_bias),
                activation=ACTIVATIONS[options.activation],
                is_gated=options.is_gated,
            ),
            mlp_norm=self._norm(f"{prefix}.{names.mlp_norm}"),
            norms_first=options.norms_first,
        )

    def _linear(self, names: list[str], out_features: list[int], in_features: int, *, has_bias: bool) -> Linear:
        return PlainFormat(self.placement).load(self.checkpoint, names, out_features, in_features, has_bias=has_bias)

    def _norm(self, name: str) -> Norm:
        """Old checkpoints call its weight gamma, and its bias beta."""
        weight, bias = ("gamma", "beta") if f"{name}.gamma" in self.checkpoint else ("weight", "bias")
        return LayerNorm(
            self._own(f"{name}.{weight}", (self.options.hidden_size,)),
            self._own(f"{name}.{bias}", (self.options.hidden_size,)) if self.options.norm_bias else None,
            self.options.norm_eps,
        )

    def _optional_table(self, prefix: str, name: str | None, num_rows: int) -> Tensor | None:
        return None if name is None or not num_rows else self._table(f"{prefix}{name}", num_rows)

    def _table(self, name: str, num_rows: int) -> Tensor:
        return self._own(f"{name}.weight", (num_rows, self.options.hidden_size))

    def _own(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return take_floats(self.checkpoint, name, shape).to(self.placement.device, self.placement.dtype, copy=True)


def load_encoder_head(
    pooling: PoolingDescription,
    checkpoint: Checkpoint,
    options: EncoderOptions,
    classifier_activation: str,
    device: torch.device,
) -> Head:
    """Behind the pooling; to be loaded before the encoder, which takes all that is left. Raises CheckpointError."""
    task, hidden = pooling.task, options.hidden_size
    if isinstance(task, Embedding):
        return Chain([load_dense(layer, device) for layer in task.dense])
    square, last = (hidden, hidden), (len(task.labels), hidden)
    if pooling.architecture.startswith("ModernBert"):
        has_bias = "head.dense.bias" in checkpoint
        dense = load_linear(checkpoint, "head.dense", square, device, has_bias=has_bias)
        norm_bias = take_floats(checkpoint, "head.norm.bias", (hidden,)) if options.norm_bias else None
        norm = LayerNorm(
            take_floats(checkpoint, "head.norm.weight", (hidden,)).to(device, torch.float32, copy=True),
            None if norm_bias is None else norm_bias.to(device, torch.float32, copy=True),
            options.norm_eps,
        )
        classifier = load_linear(checkpoint, "classifier", last, device, has_bias=True)
        return Chain([dense, ACTIVATIONS[classifier_activation], norm, classifier])
    inner, outer = ("bert.pooler.dense", "classifier")
    if not pooling.architecture.startswith("Bert"):
        inner, outer = ("classifier.dense", "classifier.out_proj")
    first = load_linear(checkpoint, inner, square, device, has_bias=True, activation="Tanh")
    second: Layer = load_linear(checkpoint, outer, last, device, has_bias=True)
    return Chain([first, second])
