"""How a layer is cut among tensor ranks (Shoeybi et al. 2019): two sums over the ranks a layer, and none besides.

Column-parallel layers make each rank its own heads or inner features from inputs that all ranks have; row-parallel
ones take them, and the ranks' results add up. Where there are more ranks than KV heads, several ranks keep the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint import Shard
from kvasir_runtime.models.options import GroupedQueryOptions
from kvasir_runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear layer over this rank's inputs alone, and its sum over the ranks."""

    linear: Linear
    tensor: Collectives

    def __call__(self, x: Tensor) -> Tensor:
        return self.tensor.all_reduce(self.linear(x))


def row_parallel(linear: Linear, tensor: Collectives) -> Callable[[Tensor], Tensor]:
    return linear if tensor.size == 1 else RowParallelLinear(linear, tensor)


def column_shard(tensor: Collectives) -> Shard | None:
    """Of outputs that are shared out evenly."""
    return None if tensor.size == 1 else Shard(0, tensor.rank, tensor.size)


def row_shard(tensor: Collectives) -> Shard | None:
    return None if tensor.size == 1 else Shard(1, tensor.rank, tensor.size)


def kv_shard(options: GroupedQueryOptions, tensor: Collectives) -> Shard | None:
    """Of the whole layer's key or value heads: each goes to as many ranks as share it."""
    copies = kv_copies(options, tensor)
    return None if tensor.size == 1 else Shard(0, tensor.rank // copies, tensor.size // copies)


def kv_copies(options: GroupedQueryOptions, tensor: Collectives) -> int:
    """Ranks that keep the same KV heads, of a whole layer with these options."""
    return max(1, tensor.size // options.num_kv_heads)


def own_heads(options: GroupedQueryOptions, tensor: Collectives) -> GroupedQueryOptions:
    """This rank's part of the layer. Raises ConfigurationError when heads do not share out evenly."""
    size, num_kv_heads = tensor.size, options.num_kv_heads
    check_divides(size, options.num_heads, "attention heads")
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}, but the model has {num_kv_heads} KV heads, which neither divide among "
            "so many ranks nor go round evenly; choose a divisor or a multiple of them"
        )
    return replace(
        options,
        num_heads=options.num_heads // size,
        num_kv_heads=max(1, num_kv_heads // size),
        kv_copies=kv_copies(options, tensor),
    )


def check_divides(size: int, number: int, what: str) -> None:
    """Raises ConfigurationError when `number` of `what` cannot be shared out evenly among `size` ranks."""
    if number % size:
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}, but the model has {number} {what}, which do not divide among so many "
            "ranks; choose a size that divides them"
        )
