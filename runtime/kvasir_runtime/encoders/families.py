"""The known families of encoders: each is one function from a Hugging Face config.json to `EncoderOptions`, and the
names that its checkpoints use. What a file does not say is what transformers' class for the family says.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvasir_runtime.encoders.options import ACTIVATIONS, EncoderLayerOptions, EncoderNames, EncoderOptions
from kvasir_runtime.errors import ModelLoadError, UnknownArchitectureError
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.rope import RopeOptions, read_rope

_MOST_LAYERS = 4096
_FULL, _SLIDING = "full_attention", "sliding_attention"

_BERT_NAMES = EncoderNames(
    prefix="bert",
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
    final_norm=None,
    unused=("pooler", "cls", "lm_head"),
)
_MODERN_NAMES = EncoderNames(
    prefix="model",
    embedding="embeddings.tok_embeddings",
    positions=None,
    types=None,
    embedding_norm="embeddings.norm",
    layers="layers",
    qkv=("attn.Wqkv",) * 3,
    attention_output="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi", "mlp.Wi"),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
    unused=("head", "decoder"),
)


def read_encoder(config: HuggingFaceConfig, architecture: str) -> tuple[EncoderOptions, EncoderNames]:
    """Raises UnknownArchitectureError, ModelLoadError."""
    family = next((family for family in _FAMILIES if architecture.startswith(family)), None)
    if family is None:
        raise UnknownArchitectureError(
            f"{config.path}: encoder {architecture} is not known; known families: {', '.join(_FAMILIES)}"
        )
    read, names = _FAMILIES[family]
    return read(config), names


def _bert(config: HuggingFaceConfig) -> EncoderOptions:
    return _learned_positions(config, first_position=0)


def _roberta(config: HuggingFaceConfig) -> EncoderOptions:
    """Positions begin behind that of padding."""
    return _learned_positions(config, first_position=config.integer("pad_token_id", 1, least=0) + 1)


def _learned_positions(config: HuggingFaceConfig, *, first_position: int) -> EncoderOptions:
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.error("position_embedding_type", "'absolute'")
    num_positions = config.integer("max_position_embeddings", 512)
    layer = EncoderLayerOptions(half_window=None, rope=None, norms_input=True)
    return EncoderOptions(
        vocab_size=config.integer("vocab_size"),
        hidden_size=_hidden_size(config),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=config.integer("num_attention_heads"),
        max_length=num_positions - first_position,
        num_positions=num_positions,
        first_position=first_position,
        num_types=config.integer("type_vocab_size", 2, least=0),
        layers=(layer,) * config.integer("num_hidden_layers", most=_MOST_LAYERS),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        norm_bias=True,
        norms_first=False,
        attention_bias=True,
        mlp_bias=True,
        is_gated=False,
        activation=_activation(config, "hidden_act"),
    )


def _modern_bert(config: HuggingFaceConfig) -> EncoderOptions:
    """Every third layer sees all of a text, the others a window; each kind turns by a base of its own."""
    hidden_size, num_heads = _hidden_size(config), config.integer("num_attention_heads")
    every = config.integer("global_attn_every_n_layers", 3)
    num_layers = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    kinds = config.texts("layer_types") or [_SLIDING if index % every else _FULL for index in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {_FULL, _SLIDING}:
        raise config.error("layer_types", f"{_FULL} or {_SLIDING} for each of {num_layers} layers")
    ropes = _modern_ropes(config, hidden_size // num_heads)
    half_window = config.integer("local_attention", 128) // 2
    return EncoderOptions(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        max_length=config.integer("max_position_embeddings"),
        num_positions=0,
        first_position=0,
        num_types=0,
        layers=tuple(
            EncoderLayerOptions(
                half_window=half_window if kind == _SLIDING else None, rope=ropes[kind], norms_input=index > 0
            )
            for index, kind in enumerate(kinds)
        ),
        norm_eps=config.number("norm_eps", 1e-5),
        norm_bias=config.flag("norm_bias", False),
        norms_first=True,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        is_gated=True,
        activation=_activation(config, "hidden_activation"),
    )


def _modern_ropes(config: HuggingFaceConfig, head_dim: int) -> dict[str, RopeOptions]:
    bases = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}
    return {
        kind: read_rope(config, head_dim, layer_type=kind, default_base=config.number(name, base))
        for kind, (name, base) in bases.items()
    }


def _hidden_size(config: HuggingFaceConfig) -> int:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise config.error("num_attention_heads", f"a divisor of the hidden_size {hidden_size}")
    return hidden_size


def _activation(config: HuggingFaceConfig, key: str) -> str:
    name = config.text(key, "gelu")
    if name not in ACTIVATIONS:
        raise ModelLoadError(f"{config.path}: {key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return name


_FAMILIES: Mapping[str, tuple[Callable[[HuggingFaceConfig], EncoderOptions], EncoderNames]] = {
    "Bert": (_bert, _BERT_NAMES),
    "Roberta": (_roberta, replace(_BERT_NAMES, prefix="roberta")),
    "XLMRoberta": (_roberta, replace(_BERT_NAMES, prefix="roberta")),
    "ModernBert": (_modern_bert, _MODERN_NAMES),
}
"""By how the names of their architectures begin."""
