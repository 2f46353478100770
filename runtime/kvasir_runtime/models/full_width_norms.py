"""Norms of query and key over all heads' numbers at once, before they are cut into heads (OLMo 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.models.layers import Norm
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import GroupedQueryOptions
from kvasir_runtime.models.tensor_parallel import column_shard, kv_copies, kv_shard
from kvasir_runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class FullWidthNorms:
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
