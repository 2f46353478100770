"""The feed-forward part of a layer whose up projection is gated."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import GatedMlpOptions


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: Linear
    down: Linear
    activate_and_mul: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activate_and_mul(self.gate_up(hidden)))


def load_gated_mlp(
    modules: ModuleLoader, prefix: str, names: LayerNames, options: GatedMlpOptions, hidden_size: int
) -> GatedMlp:
    """The MLP of the layer `prefix`."""
    size, ops = options.intermediate_size, modules.placement.ops
    return GatedMlp(
        gate_up=modules.linear(
            [f"{prefix}.{name}" for name in names.gate_up], [size, size], hidden_size, has_bias=options.bias
        ),
        down=modules.linear([f"{prefix}.{names.down}"], [hidden_size], size, has_bias=options.bias),
        activate_and_mul=ops.silu_and_mul if options.activation == "silu" else ops.gelu_tanh_and_mul,
    )
