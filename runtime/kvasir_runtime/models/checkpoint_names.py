"""What the families call their tensors. Only loading knows these names; the architecture's options do not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir_runtime.models.options import NormPlace

_NORMS: Mapping[NormPlace, str] = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Modules of a decoder layer, below its prefix. Parts of one name lie in one tensor, in their order."""

    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norms: Mapping[NormPlace, str] = field(default_factory=lambda: _NORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    """Prefix of the layers, before their index."""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: LayerNames = LayerNames()


_GEMMA = CheckpointNames(layer=LayerNames(norms={**_NORMS, "before_mlp": "pre_feedforward_layernorm"}))
_PHI3 = CheckpointNames(layer=LayerNames(qkv=("self_attn.qkv_proj",) * 3, gate_up=("mlp.gate_up_proj",) * 2))

_OF_ARCHITECTURE: Mapping[str, CheckpointNames] = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Phi3ForCausalLM": _PHI3,
}


def names_of(architecture: str) -> CheckpointNames:
    """Most families use Llama's names."""
    return _OF_ARCHITECTURE.get(architecture, CheckpointNames())
