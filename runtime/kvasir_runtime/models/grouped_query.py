"""Multi-head attention with shared key and value heads, over the paged KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, HeadNorms, LayerCache
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.layers import Norm
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import GroupedQueryOptions
from kvasir_runtime.models.tensor_parallel import column_shard, kv_copies, kv_shard, own_heads, row_parallel, row_shard
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
        return attended.view(hidden.shape[0], options.query_size)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [num_tokens, heads, head_dim]; views of one buffer where nothing is normalised."""
        options = self.options
        sizes = [options.query_size, options.kv_size, options.kv_size]
        query, key, value = torch.split_with_sizes(self.qkv(hidden), sizes, -1)
        if isinstance(self.norms, FullWidthNorms):
            query, key = self.norms(query, key)
        num_tokens = hidden.shape[0]
        return (
            query.view(num_tokens, options.num_heads, options.head_dim),
            key.view(num_tokens, options.num_kv_heads, options.head_dim),
            value.view(num_tokens, options.num_kv_heads, options.head_dim),
        )


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
