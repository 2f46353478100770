"""The two parts of a dense layer: multi-head attention with shared key and value heads over the paged KV cache, and the
MLP whose up projection is gated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, HeadNorms, LayerCache
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.decoder import Norm
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import GatedMlpOptions, GroupedQueryOptions
from kvasir_runtime.models.tensor_parallel import (
    check_divides,
    column_shard,
    kv_copies,
    kv_shard,
    own_heads,
    row_parallel,
    row_shard,
)
from kvasir_runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class FullWidthNorms:
    """Norms of query and key over all heads' numbers at once, before they are cut into heads (OLMo 2)."""

    query: Norm
    key: Norm
    widths: Tensor  # float32 [2]: numbers of query and of key on all ranks together, keys kept twice counted twice
    tensor: Collectives

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query [n, query_size] and key [n, kv_size] of this rank's heads, normalised over those of all ranks."""
        if self.tensor.size == 1:
            return self.query(query), self.key(key)
        squares = torch.stack([x.float().square().sum(-1) for x in (query, key)], -1)
        means = self.tensor.all_reduce(squares) / self.widths
        return _scaled(query, means[:, :1], self.query), _scaled(key, means[:, 1:], self.key)


def _scaled(x: Tensor, mean_square: Tensor, norm: Norm) -> Tensor:
    return (x.float() * torch.rsqrt(mean_square + norm.eps) * norm.weight.float()).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """The projections; norms of heads, rotation, KV cache and softmax are the attention step's."""

    options: GroupedQueryOptions
    """Of this rank's heads."""
    qkv: Linear
    output: Callable[[Tensor], Tensor]
    cos: Tensor  # float32 [num_positions, rotary_dim]
    sin: Tensor
    norms: FullWidthNorms | HeadNorms | None

    cache_index: int
    """Of its cache among those of the rank's layers."""

    def kv_specs(self, dtype: torch.dtype) -> tuple[KvSpec, ...]:
        return self.options.kv_specs(dtype)

    def __call__(self, hidden: Tensor, step: AttentionStep, caches: Sequence[LayerCache]) -> Tensor:
        """Attention of this rank's heads, before the output projection: [num_tokens, num_heads * head_dim]."""
        options, cache = self.options, caches[self.cache_index]
        query, key, value = self._project(hidden)
        head_norms = self.norms if isinstance(self.norms, HeadNorms) else None
        query = step.rotate_and_write(query, key, value, cache, self.cos, self.sin, head_norms)
        attended = step.attend(query, cache, scale=options.scale, window=options.window, softcap=options.softcap)
        return attended.flatten(1)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [num_tokens, heads, head_dim]; views of one buffer where nothing is normalised."""
        options = self.options
        num_heads = [options.num_heads, options.num_kv_heads, options.num_kv_heads]
        heads = self.qkv(hidden).view(hidden.shape[0], sum(num_heads), options.head_dim)
        query, key, value = torch.split_with_sizes(heads, num_heads, 1)
        if isinstance(self.norms, FullWidthNorms):
            normed = self.norms(query.flatten(1), key.flatten(1))
            query, key = normed[0].view_as(query), normed[1].view_as(key)
        return query, key, value


def load_grouped_query(
    modules: ModuleLoader,
    prefix: str,
    names: LayerNames,
    options: GroupedQueryOptions,
    hidden_size: int,
    in_features: int,
    cache_index: int,
) -> GroupedQueryAttention:
    """This rank's heads of the attention of the layer `prefix`, from inputs [num_tokens, in_features] to the hidden
    size. `options` are the whole layer's. Raises ConfigurationError, CheckpointError."""
    cos, sin = modules.ropes.of(options.rope)
    tensor = modules.placement.tensor
    own = own_heads(options, tensor)
    queries, keys = column_shard(tensor), kv_shard(options, tensor)
    output = modules.linear(
        [f"{prefix}.{names.attention_output}"],
        [hidden_size],
        options.query_size,
        has_bias=options.output_bias,
        shard=row_shard(tensor),
    )
    return GroupedQueryAttention(
        options=own,
        qkv=modules.linear(
            [f"{prefix}.{name}" for name in names.qkv],
            [options.query_size, options.kv_size, options.kv_size],
            in_features,
            has_bias=options.qkv_bias,
            shard=None if queries is None or keys is None else (queries, keys, keys),
        ),
        output=row_parallel(output, tensor),
        cos=cos,
        sin=sin,
        cache_index=cache_index,
        norms=_load_norms(modules, f"{prefix}.{names.query_norm}", f"{prefix}.{names.key_norm}", options),
    )


def _load_norms(
    modules: ModuleLoader, query: str, key: str, options: GroupedQueryOptions
) -> FullWidthNorms | HeadNorms | None:
    if options.query_key_norm is None:
        return None
    if options.query_key_norm == "full_width":
        return load_full_width_norms(modules, query, key, options)
    query_norm, key_norm = modules.norm(query, options.head_dim), modules.norm(key, options.head_dim)
    return HeadNorms(query_norm.weight, key_norm.weight, query_norm.eps)


def load_full_width_norms(modules: ModuleLoader, query: str, key: str, options: GroupedQueryOptions) -> FullWidthNorms:
    """`options` are the whole layer's. Raises CheckpointError."""
    tensor = modules.placement.tensor
    widths = (options.query_size, options.kv_size * kv_copies(options, tensor))
    return FullWidthNorms(
        query=modules.norm(query, options.query_size, column_shard(tensor)),
        key=modules.norm(key, options.kv_size, kv_shard(options, tensor)),
        widths=torch.tensor(widths, dtype=torch.float32, device=modules.placement.device),
        tensor=tensor,
    )


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: Linear
    down: Callable[[Tensor], Tensor]
    activate_and_mul: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activate_and_mul(self.gate_up(hidden)))


def load_gated_mlp(
    modules: ModuleLoader,
    prefix: str,
    names: LayerNames,
    options: GatedMlpOptions,
    hidden_size: int,
    *,
    is_summed: bool = True,
) -> GatedMlp:
    """This rank's part of the MLP of the layer `prefix`; without `is_summed` the caller adds up the ranks' results.

    Raises ConfigurationError, CheckpointError.
    """
    size, ops, tensor = options.intermediate_size, modules.placement.ops, modules.placement.tensor
    check_divides(tensor.size, size, "inner features of its MLP")
    gates_and_ups = [f"{prefix}.{name}" for name in names.gate_up]
    down = modules.linear(
        [f"{prefix}.{names.down}"], [hidden_size], size, has_bias=options.bias, shard=row_shard(tensor)
    )
    return GatedMlp(
        gate_up=modules.linear(
            gates_and_ups, [size, size], hidden_size, has_bias=options.bias, shard=column_shard(tensor)
        ),
        down=row_parallel(down, tensor) if is_summed else down,
        activate_and_mul=activation_of(options, ops),
    )


def activation_of(options: GatedMlpOptions, ops: Ops) -> Callable[[Tensor], Tensor]:
    """Of gate and up side by side [num_tokens, 2 * intermediate_size]."""
    return ops.silu_and_mul if options.activation == "silu" else ops.gelu_tanh_and_mul
