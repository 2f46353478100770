"""The feed-forward part of a layer whose up projection is gated."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import GatedMlpOptions
from kvasir_runtime.models.tensor_parallel import check_divides, column_shard, row_parallel, row_shard


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
