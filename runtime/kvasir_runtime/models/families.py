"""The known architectures: each is one function from a Hugging Face config.json to `DecoderOptions`.

A new family of decoders is added by writing such a function and naming it in `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from kvasir_runtime.errors import ModelLoadError, UnknownArchitectureError
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.options import DecoderOptions, LayerNorms, LayerOptions
from kvasir_runtime.models.rope import RopeOptions, read_rope

PRE_NORMS = LayerNorms(
    before_attention="input_layernorm", after_attention=None, before_mlp="post_attention_layernorm", after_mlp=None
)
POST_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
SANDWICH_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_options(config: HuggingFaceConfig) -> DecoderOptions:
    """Options of the architecture that config.json names. Raises UnknownArchitectureError, ModelLoadError."""
    architectures = config.texts("architectures") or []
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        seen = ", ".join(architectures) or f"none (model_type {config.text('model_type', 'missing')!r})"
        raise UnknownArchitectureError(
            f"{config.path}: architecture {seen} is not known; known architectures: {', '.join(sorted(FAMILIES))}"
        )
    if config.values.get("quantization_config"):
        raise ModelLoadError(f"{config.path}: quantized checkpoints are not supported; use one in bf16, fp16 or fp32")
    return family(config)


def _llama(config: HuggingFaceConfig) -> DecoderOptions:
    """The plain pre-norm decoder that the others vary."""
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    attention_bias = config.flag("attention_bias", False)
    layer = LayerOptions(window=None, rope=read_rope(config, head_dim))
    return DecoderOptions(
        architecture=(config.texts("architectures") or [""])[0],
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings"),
        layers=(layer,) * config.integer("num_hidden_layers"),
        norms=PRE_NORMS,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        norm_weight_offset=0.0,
        activation=_activation(config, "hidden_act", "silu"),
        attention_scale=head_dim**-0.5,
        attention_softcap=None,
        logit_softcap=None,
        embedding_scale=None,
        query_key_norm=None,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        packed_projections=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
    )


def _mistral(config: HuggingFaceConfig) -> DecoderOptions:
    """Every layer slides, when the checkpoint declares a window."""
    options = _llama(config)
    window = config.optional_integer("sliding_window")
    return replace(options, layers=tuple(replace(layer, window=window) for layer in options.layers))


def _qwen2(config: HuggingFaceConfig) -> DecoderOptions:
    options = replace(_llama(config), qkv_bias=True, attention_output_bias=False)
    return replace(options, layers=_qwen_layers(config, options))


def _qwen3(config: HuggingFaceConfig) -> DecoderOptions:
    """Normalises query and key per head; its head size does not follow from the hidden size."""
    head_dim = config.integer("head_dim", 128)
    options = replace(_llama(config), head_dim=head_dim, attention_scale=head_dim**-0.5, query_key_norm="per_head")
    layers = tuple(replace(layer, rope=read_rope(config, head_dim)) for layer in options.layers)
    options = replace(options, layers=layers)
    return replace(options, layers=_qwen_layers(config, options))


def _qwen_layers(config: HuggingFaceConfig, options: DecoderOptions) -> tuple[LayerOptions, ...]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says which do."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    first_sliding = config.integer("max_window_layers", 28)
    default = ["sliding_attention" if i >= first_sliding else "full_attention" for i in range(options.num_layers)]
    return tuple(
        replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(options.layers, _layer_types(config, default), strict=True)
    )


def _gemma2(config: HuggingFaceConfig) -> DecoderOptions:
    """Norms on both sides, (1 + w) norms, scaled embeddings, soft-caps; every other layer slides."""
    head_dim = config.integer("head_dim", 256)
    bias = config.flag("attention_bias", False)
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window", 4096)
    kinds = _layer_types(config, ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)])
    if config.flag("use_bidirectional_attention", False):
        raise ModelLoadError(
            f"{config.path}: use_bidirectional_attention is for encoders; only causal models are served"
        )
    return replace(
        _llama(config),
        head_dim=head_dim,
        num_kv_heads=config.integer("num_key_value_heads", 4),
        layers=tuple(
            LayerOptions(
                window=window if kind == "sliding_attention" else None,
                rope=read_rope(config, head_dim, layer_type=kind),
            )
            for kind in kinds
        ),
        norms=SANDWICH_NORMS,
        norm_weight_offset=1.0,
        activation=_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        qkv_bias=bias,
        attention_output_bias=bias,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gemma3(config: HuggingFaceConfig) -> DecoderOptions:
    """Gemma 2 with query and key norms for the attention soft-cap, and sliding layers with a rope of their own."""
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    num_layers = config.integer("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    options = _gemma2(config)
    window = config.integer("sliding_window", 4096)
    full = read_rope(config, options.head_dim, layer_type="full_attention", default_base=1_000_000.0)
    sliding = _gemma3_sliding_rope(config, options.head_dim)
    return replace(
        options,
        layers=tuple(
            LayerOptions(window=window, rope=sliding)
            if kind == "sliding_attention"
            else LayerOptions(window=None, rope=full)
            for kind in _layer_types(config, default)
        ),
        attention_softcap=None,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        query_key_norm="per_head",
    )


def _gemma3_sliding_rope(config: HuggingFaceConfig, head_dim: int) -> RopeOptions:
    """Older files keep the sliding layers' base beside the full layers' parameters, and never scale it."""
    if isinstance(config.mapping("rope_parameters").get("sliding_attention"), Mapping):
        return read_rope(config, head_dim, layer_type="sliding_attention")
    max_position_embeddings = config.integer("max_position_embeddings")
    return RopeOptions(
        rope_type="default",
        base=config.number("rope_local_base_freq", 10_000.0),
        rotary_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=max_position_embeddings,
    )


def _phi3(config: HuggingFaceConfig) -> DecoderOptions:
    """Packed projections, rope over a part of each head; `su` and `yarn` in its files mean longrope."""
    options = _mistral(config)
    rope = options.layers[0].rope
    if config.mapping("rope_scaling").get("type") in ("su", "yarn"):
        rope = replace(rope, rope_type="longrope")
    return replace(
        options,
        layers=tuple(replace(layer, rope=rope) for layer in options.layers),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        packed_projections=True,
    )


def _olmo2(config: HuggingFaceConfig) -> DecoderOptions:
    """Norms only after attention and MLP; query and key are normalised over all heads at once."""
    return replace(
        _llama(config),
        norms=POST_NORMS,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        query_key_norm="full_width",
    )


def _activation(config: HuggingFaceConfig, key: str, default: str) -> Literal["silu", "gelu_tanh"]:
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"{config.path}: {key} {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layer_types(config: HuggingFaceConfig, default: list[str]) -> list[str]:
    kinds = config.texts("layer_types") or default
    num_layers = config.integer("num_hidden_layers")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if len(kinds) != num_layers or unknown:
        raise ModelLoadError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers, unknown among them: "
            f"{unknown}; expected full_attention or sliding_attention for each layer"
        )
    return kinds


FAMILIES: Mapping[str, Callable[[HuggingFaceConfig], DecoderOptions]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
