"""What the families call their tensors. Only loading knows these names; the architecture's options do not."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from kvasir_runtime.models.options import NormPlace

_NORMS: Mapping[NormPlace, str] = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Modules of a mixture of experts, below the layer's prefix."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    """Before the expert's index; `gate_up` and `down` come after it, and after `shared`."""
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExpertNames:
    """Of the same where all experts lie in one tensor: how transformers computes them, and saves them when it is asked
    to keep its own form (`save_original_format=False`)."""

    router: str = "mlp.gate"
    gate_up: str = "mlp.experts.gate_up_proj"
    """[num_experts, 2 * intermediate_size, hidden_size], without a `.weight`; so is `down`."""
    down: str = "mlp.experts.down_proj"


FUSED_EXPERTS = FusedExpertNames()


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
    experts: ExpertNames = ExpertNames()


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
_MIXTRAL = CheckpointNames(
    layer=LayerNames(
        experts=ExpertNames(
            router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate_up=("w1", "w3"), down="w2"
        )
    )
)

_OF_ARCHITECTURE: Mapping[str, CheckpointNames] = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "MixtralForCausalLM": _MIXTRAL,
    "Phi3ForCausalLM": _PHI3,
}


_WITHOUT_HEAD = "model."
"""Before the names of all modules but the head; checkpoints saved without a head leave it out."""


def names_of(architecture: str) -> CheckpointNames:
    """Most families use Llama's names."""
    return _OF_ARCHITECTURE.get(architecture, CheckpointNames())


def names_in(tensors: Container[str], architecture: str) -> CheckpointNames:
    """As the checkpoint with these tensors has them."""
    names = names_of(architecture)
    embedding = names.embedding.removeprefix(_WITHOUT_HEAD)
    if f"{embedding}.weight" not in tensors:
        return names
    return replace(
        names,
        embedding=embedding,
        layers=names.layers.removeprefix(_WITHOUT_HEAD),
        norm=names.norm.removeprefix(_WITHOUT_HEAD),
    )
