"""The feed-forward part of a layer as a mixture of experts: each token goes to a few gated MLPs of many.

Pairs of a token and an expert are sorted by expert, so that each expert is one product over its tokens. All shapes
follow from the number of tokens, never from the routing: nothing waits for the host, and CUDA graphs hold it.

Among ranks either each expert is cut as a dense MLP is, or, expert-parallel, each rank has whole experts and computes
only their pairs. Both ways the ranks' results, and the shared expert's with them, add up in one sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.grouped_linear import GroupedWeight
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.models.checkpoint import Shard
from kvasir_runtime.models.checkpoint_names import FUSED_EXPERTS, ExpertNames, LayerNames
from kvasir_runtime.models.dense_layer import GatedMlp, activation_of, load_gated_mlp
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import DecoderOptions, MoeOptions
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.tensor_parallel import check_divides, column_shard, row_shard
from kvasir_runtime.models.weight_format import ExpertTensors
from kvasir_runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Of every token; its weight is a sigmoid of the token."""

    mlp: GatedMlp
    gate: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(hidden)) * self.mlp(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    options: MoeOptions
    router: Linear
    gate_up: GroupedWeight
    down: GroupedWeight
    local: range
    """The experts of this rank."""
    shared: SharedExpert | None
    activate_and_mul: Callable[[Tensor], Tensor]
    ops: Ops
    tensor: Collectives

    def __call__(self, hidden: Tensor) -> Tensor:
        routing = self.ops.route(self.router(hidden), self.options.top_k, self.options.renormalises)
        groups = self.ops.group_by_expert(routing.experts, self.local)
        inner = self.activate_and_mul(self.gate_up.multiply_tokens(hidden, groups))
        outputs = self.down.multiply_pairs(inner, groups)
        combined = self.ops.combine_experts(outputs, routing, self.local)
        if self.shared is not None:
            combined = combined + self.shared(hidden)
        return self.tensor.all_reduce(combined)


def load_mixture(
    modules: ModuleLoader, prefix: str, names: LayerNames, options: MoeOptions, hidden_size: int
) -> MixtureOfExperts:
    """This rank's part of the mixture of the layer `prefix`. Raises ConfigurationError, CheckpointError."""
    placement = modules.placement
    local = local_experts(options.num_experts, placement)
    source = _source(modules, prefix, names.experts)
    size, shards = options.expert.intermediate_size, _shards(options, placement)
    gate_up = ExpertTensors(
        num_experts=options.num_experts, names=source.gate_up, out_features=[size, size], in_features=hidden_size
    )
    down = ExpertTensors(
        num_experts=options.num_experts, names=source.down, out_features=[hidden_size], in_features=size
    )
    return MixtureOfExperts(
        options=options,
        router=modules.linear([source.router], [options.num_experts], hidden_size),
        gate_up=modules.experts(gate_up, local, shards.column),
        down=modules.experts(down, local, shards.row),
        local=local,
        shared=_load_shared(modules, prefix, names, options, hidden_size),
        activate_and_mul=activation_of(options.expert, placement.ops),
        ops=placement.ops,
        tensor=placement.tensor,
    )


def check_has_experts(options: DecoderOptions) -> None:
    """Of a model that is loaded expert-parallel. Raises ConfigurationError."""
    if not any(isinstance(layer.mlp, MoeOptions) for layer in options.layers):
        raise ConfigurationError(
            f"--enable-expert-parallel: a {options.architecture} has no experts to share out; leave the flag out"
        )


def local_experts(num_experts: int, placement: Placement) -> range:
    """All, or, expert-parallel, this rank's: as many as the others have, or one less. Raises ConfigurationError."""
    size, rank = placement.tensor.size, placement.tensor.rank
    if not placement.expert_parallel:
        return range(num_experts)
    if size > num_experts:
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}, but the model has {num_experts} experts, of which every rank needs one "
            "with --enable-expert-parallel; choose a smaller size, or leave the flag out"
        )
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Of each expert's weights; None: whole."""

    column: Shard | None
    row: Shard | None


def _shards(options: MoeOptions, placement: Placement) -> _Shards:
    if placement.expert_parallel:
        return _Shards(None, None)
    tensor = placement.tensor
    check_divides(tensor.size, options.expert.intermediate_size, "inner features of each expert")
    return _Shards(column_shard(tensor), row_shard(tensor))


@dataclass(frozen=True, slots=True)
class _Source:
    """What the checkpoint calls a layer's router and its experts' weights, as `ExpertTensors.names`."""

    router: str
    gate_up: Callable[[int], Sequence[str]] | str
    down: Callable[[int], Sequence[str]] | str


def _source(modules: ModuleLoader, prefix: str, names: ExpertNames) -> _Source:
    fused = FUSED_EXPERTS
    if f"{prefix}.{fused.gate_up}" in modules.checkpoint:
        return _Source(f"{prefix}.{fused.router}", f"{prefix}.{fused.gate_up}", f"{prefix}.{fused.down}")
    experts = f"{prefix}.{names.experts}"
    return _Source(
        router=f"{prefix}.{names.router}",
        gate_up=lambda expert: [f"{experts}.{expert}.{name}" for name in names.gate_up],
        down=lambda expert: [f"{experts}.{expert}.{names.down}"],
    )


def _load_shared(
    modules: ModuleLoader, prefix: str, names: LayerNames, options: MoeOptions, hidden_size: int
) -> SharedExpert | None:
    if options.shared is None:
        return None
    experts = names.experts
    gate, up, down = (f"{experts.shared}.{name}" for name in (*experts.gate_up, experts.down))
    own = replace(names, gate_up=(gate, up), down=down)
    return SharedExpert(
        mlp=load_gated_mlp(modules, prefix, own, options.shared, hidden_size, is_summed=False),
        gate=modules.linear([f"{prefix}.{experts.shared_gate}"], [1], hidden_size),
    )
