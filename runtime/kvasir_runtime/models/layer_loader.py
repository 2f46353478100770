"""Loads decoder layers of any kind. A new kind of attention or MLP is one more line in the tables below."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.decoder import Attention, DecoderLayer, Norm
from kvasir_runtime.models.dense_layer import load_gated_mlp, load_grouped_query
from kvasir_runtime.models.mixture_of_experts import load_mixture
from kvasir_runtime.models.module_loader import ModuleLoader
from kvasir_runtime.models.options import (
    AttentionOptions,
    GatedMlpOptions,
    GroupedQueryOptions,
    LayerOptions,
    MlpOptions,
    MoeOptions,
    NormPlace,
)

_ATTENTION: Mapping[type[AttentionOptions], Callable[..., Attention]] = {GroupedQueryOptions: load_grouped_query}
_MLP: Mapping[type[MlpOptions], Callable[..., Callable[[Tensor], Tensor]]] = {
    GatedMlpOptions: load_gated_mlp,
    MoeOptions: load_mixture,
}


@dataclass(slots=True)
class LayerLoader:
    """The layers of a decoder, or the one layer of a draft head: prefixes and names are whatever its checkpoint has."""

    modules: ModuleLoader
    names: LayerNames
    hidden_size: int
    _num_caches: int = 0
    """Of the layers loaded so far."""

    def layer(self, prefix: str, options: LayerOptions) -> DecoderLayer:
        """The layer whose modules begin with `prefix`. Raises CheckpointError, ModelLoadError."""
        return DecoderLayer(
            attention=self.attention(prefix, options.attention),
            mlp=self.mlp(prefix, options.mlp),
            before_attention=self._norm(prefix, "before_attention", options),
            after_attention=self._norm(prefix, "after_attention", options),
            before_mlp=self._norm(prefix, "before_mlp", options),
            after_mlp=self._norm(prefix, "after_mlp", options),
        )

    def attention(self, prefix: str, options: AttentionOptions, in_features: int | None = None) -> Attention:
        """`in_features`: size of the inputs where it is not the hidden size (EAGLE-3 joins two streams). Its caches
        come behind those of the layers loaded before."""
        load = _ATTENTION[type(options)]
        size = self.hidden_size if in_features is None else in_features
        attention = load(self.modules, prefix, self.names, options, self.hidden_size, size, self._num_caches)
        self._num_caches += len(attention.kv_specs(self.modules.placement.dtype))
        return attention

    def mlp(self, prefix: str, options: MlpOptions) -> Callable[[Tensor], Tensor]:
        return _MLP[type(options)](self.modules, prefix, self.names, options, self.hidden_size)

    def _norm(self, prefix: str, place: NormPlace, options: LayerOptions) -> Norm | None:
        if place not in options.norms:
            return None
        return self.modules.norm(f"{prefix}.{self.names.norms[place]}", self.hidden_size)
