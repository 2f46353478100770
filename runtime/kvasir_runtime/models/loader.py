"""Builds a decoder from a checkpoint, module by module: each weight is copied once, cast and joined to its siblings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder, Embedding
from kvasir_runtime.models.layers import Attention, DecoderLayer, GatedMlp, Norm
from kvasir_runtime.models.options import DecoderOptions, LayerOptions
from kvasir_runtime.models.rope import RopeOptions, rope_tables

_LEFTOVERS = ("rotary_emb.inv_freq",)
"""Buffers that older checkpoints saved along with the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and with what the decoder computes."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    backend: AttentionBackend
    make_linear: Callable[[Tensor, Tensor | None], Linear]
    """From weight and bias, both handed over."""


def load_decoder(checkpoint: Checkpoint, options: DecoderOptions, placement: Placement, max_model_len: int) -> Decoder:
    """The decoder with its weights on the device; `max_model_len` sizes its rope tables. Raises CheckpointError."""
    decoder = _Builder(checkpoint, options, placement, _rope_tables(options, max_model_len, placement.device)).decoder()
    tied_head = ("lm_head.weight",) if options.tie_word_embeddings else ()
    checkpoint.check_all_taken(ignored=(*_LEFTOVERS, *tied_head))
    return decoder


class _RopeTables:
    """One pair of tables for each distinct rope, shared by its layers."""

    def __init__(self, tables: list[tuple[RopeOptions, tuple[Tensor, Tensor]]]) -> None:
        self._tables = tables

    def of(self, rope: RopeOptions) -> tuple[Tensor, Tensor]:
        return next(tables for options, tables in self._tables if options == rope)


def _rope_tables(options: DecoderOptions, num_positions: int, device: torch.device) -> _RopeTables:
    distinct: list[RopeOptions] = []
    for layer in options.layers:
        if layer.rope not in distinct:
            distinct.append(layer.rope)
    return _RopeTables([(rope, rope_tables(rope, num_positions, device)) for rope in distinct])


@dataclass(frozen=True, slots=True)
class _Builder:
    checkpoint: Checkpoint
    options: DecoderOptions
    placement: Placement
    ropes: _RopeTables

    def decoder(self) -> Decoder:
        options = self.options
        shape = (options.vocab_size, options.hidden_size)
        table: Tensor | Linear = self._packed(["model.embed_tokens.weight"], [shape])
        if isinstance(table, Tensor) and options.tie_word_embeddings:
            table = self.placement.make_linear(table, None)
        return Decoder(
            options=options,
            embedding=Embedding(table, self._embedding_scale()),
            layers=tuple(self._layer(index, layer) for index, layer in enumerate(options.layers)),
            norm=self._norm("model.norm", options.hidden_size),
            head=table
            if isinstance(table, Linear)
            else self._linear(["lm_head"], [options.vocab_size], options.hidden_size, False),
        )

    def _layer(self, index: int, layer: LayerOptions) -> DecoderLayer:
        prefix, norms, hidden_size = f"model.layers.{index}", self.options.norms, self.options.hidden_size
        return DecoderLayer(
            attention=self._attention(f"{prefix}.self_attn", layer),
            mlp=self._mlp(f"{prefix}.mlp"),
            before_attention=self._optional_norm(prefix, norms.before_attention, hidden_size),
            after_attention=self._optional_norm(prefix, norms.after_attention, hidden_size),
            before_mlp=self._optional_norm(prefix, norms.before_mlp, hidden_size),
            after_mlp=self._optional_norm(prefix, norms.after_mlp, hidden_size),
        )

    def _attention(self, prefix: str, layer: LayerOptions) -> Attention:
        options, placement = self.options, self.placement
        query_size, kv_size = options.num_heads * options.head_dim, options.num_kv_heads * options.head_dim
        full_width = options.query_key_norm == "full_width"
        query_norm, key_norm = ("q_norm", "k_norm") if options.query_key_norm else (None, None)
        cos, sin = self.ropes.of(layer.rope)
        parts = ["qkv_proj"] if options.packed_projections else ["q_proj", "k_proj", "v_proj"]
        qkv, output = [f"{prefix}.{name}" for name in parts], [f"{prefix}.o_proj"]
        sizes = [query_size + 2 * kv_size] if options.packed_projections else [query_size, kv_size, kv_size]
        return Attention(
            ops=placement.ops,
            backend=placement.backend,
            qkv=self._linear(qkv, sizes, options.hidden_size, options.qkv_bias),
            output=self._linear(output, [options.hidden_size], query_size, options.attention_output_bias),
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            scale=options.attention_scale,
            softcap=options.attention_softcap,
            window=layer.window,
            cos=cos,
            sin=sin,
            query_norm=self._optional_norm(prefix, query_norm, query_size if full_width else options.head_dim),
            key_norm=self._optional_norm(prefix, key_norm, kv_size if full_width else options.head_dim),
            full_width_norm=full_width,
        )

    def _mlp(self, prefix: str) -> GatedMlp:
        options, ops = self.options, self.placement.ops
        size = options.intermediate_size
        parts = ["gate_up_proj"] if options.packed_projections else ["gate_proj", "up_proj"]
        gate_up, down = [f"{prefix}.{name}" for name in parts], [f"{prefix}.down_proj"]
        sizes = [2 * size] if options.packed_projections else [size, size]
        return GatedMlp(
            gate_up=self._linear(gate_up, sizes, options.hidden_size, options.mlp_bias),
            down=self._linear(down, [options.hidden_size], size, options.mlp_bias),
            activate_and_mul=ops.silu_and_mul if options.activation == "silu" else ops.gelu_tanh_and_mul,
        )

    def _linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool) -> Linear:
        """One linear layer from the checkpoint's layers `names`, their outputs side by side."""
        weight = self._packed([f"{name}.weight" for name in names], [(size, in_features) for size in out_features])
        bias = (
            self._packed([f"{name}.bias" for name in names], [(size,) for size in out_features]) if has_bias else None
        )
        return self.placement.make_linear(weight, bias)

    def _packed(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Tensors joined along their first dimension, in memory of our own."""
        num_rows = sum(shape[0] for shape in shapes)
        packed = torch.empty((num_rows, *shapes[0][1:]), dtype=self.placement.dtype, device=self.placement.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            packed[start : start + shape[0]].copy_(self.checkpoint.take(name, shape))
            start += shape[0]
        return packed

    def _optional_norm(self, prefix: str, name: str | None, size: int) -> Norm | None:
        return None if name is None else self._norm(f"{prefix}.{name}", size)

    def _norm(self, prefix: str, size: int) -> Norm:
        """The offset of (1 + w) norms is added in float32, and stays in it: bf16 would round w away."""
        offset = self.options.norm_weight_offset
        weight = self.checkpoint.take(f"{prefix}.weight", (size,))
        dtype = torch.float32 if offset else self.placement.dtype
        own = (weight.float() + offset).to(device=self.placement.device, dtype=dtype, copy=True)
        return Norm(self.placement.ops, own, self.options.norm_eps)

    def _embedding_scale(self) -> float | None:
        """Rounded to the model's type, as the architectures that scale were trained."""
        scale = self.options.embedding_scale
        return None if scale is None else torch.tensor(scale, dtype=self.placement.dtype).item()
