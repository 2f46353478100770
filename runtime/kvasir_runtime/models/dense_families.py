"""The known families of dense decoders: each is one function from a Hugging Face config.json to `DecoderOptions`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.options import (
    POST_NORMS,
    PRE_NORMS,
    SANDWICH_NORMS,
    DecoderOptions,
    GatedMlpOptions,
    GroupedQueryOptions,
    LayerOptions,
)
from kvasir_runtime.models.rope import RopeOptions, read_rope

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def llama(config: HuggingFaceConfig) -> DecoderOptions:
    """The plain pre-norm decoder that the others vary."""
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    bias = config.flag("attention_bias", False)
    attention = GroupedQueryOptions(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        softcap=None,
        window=None,
        rope=read_rope(config, head_dim),
        query_key_norm=None,
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = LayerOptions(attention=attention, mlp=gated_mlp(config, "hidden_act", "silu"), norms=PRE_NORMS)
    return DecoderOptions(
        architecture="LlamaForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings"),
        layers=(layer,) * config.integer("num_hidden_layers"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        norm_weight_offset=0.0,
        logit_softcap=None,
        embedding_scale=None,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        quantization=config.mapping("quantization_config") or None,
    )


def mistral(config: HuggingFaceConfig) -> DecoderOptions:
    """Every layer slides, when the checkpoint declares a window."""
    window = config.optional_integer("sliding_window")
    return with_attention(llama(config), lambda _, attention: replace(attention, window=window))


def qwen2(config: HuggingFaceConfig) -> DecoderOptions:
    windows = _qwen_windows(config)
    return with_attention(
        llama(config),
        lambda index, attention: replace(attention, window=windows[index], qkv_bias=True, output_bias=False),
    )


def qwen3(config: HuggingFaceConfig) -> DecoderOptions:
    """Normalises query and key per head; its head size does not follow from the hidden size."""
    head_dim = config.integer("head_dim", 128)
    rope, windows = read_rope(config, head_dim), _qwen_windows(config)

    def change(index: int, attention: GroupedQueryOptions) -> GroupedQueryOptions:
        return replace(
            attention,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            window=windows[index],
            query_key_norm="per_head",
        )

    return with_attention(llama(config), change)


def _qwen_windows(config: HuggingFaceConfig) -> list[int | None]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says which do."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    first_sliding, num_layers = config.integer("max_window_layers", 28), config.integer("num_hidden_layers")
    default = ["sliding_attention" if i >= first_sliding else "full_attention" for i in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in layer_types(config, default)]


def gemma2(config: HuggingFaceConfig) -> DecoderOptions:
    """Soft-caps attention and logits; every other layer slides, the first among them."""
    num_layers = config.integer("num_hidden_layers")
    kinds = layer_types(config, ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)])
    head_dim, window = config.integer("head_dim", 256), config.integer("sliding_window", 4096)
    softcap = config.optional_number("attn_logit_softcapping", 50.0)

    def change(index: int, attention: GroupedQueryOptions) -> GroupedQueryOptions:
        return replace(
            attention,
            window=window if kinds[index] == "sliding_attention" else None,
            rope=read_rope(config, head_dim, layer_type=kinds[index]),
            softcap=softcap,
        )

    options = replace(_gemma(config), logit_softcap=config.optional_number("final_logit_softcapping", 30.0))
    return with_attention(options, change)


def gemma3(config: HuggingFaceConfig) -> DecoderOptions:
    """Query and key norms instead of the attention soft-cap, and sliding layers with a rope of their own."""
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    num_layers = config.integer("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    kinds = layer_types(config, default)
    head_dim, window = config.integer("head_dim", 256), config.integer("sliding_window", 4096)
    full = read_rope(config, head_dim, layer_type="full_attention", default_base=1_000_000.0)
    sliding = _gemma3_sliding_rope(config, head_dim)

    def change(index: int, attention: GroupedQueryOptions) -> GroupedQueryOptions:
        attention = replace(attention, query_key_norm="per_head")
        if kinds[index] == "sliding_attention":
            return replace(attention, window=window, rope=sliding)
        return replace(attention, window=None, rope=full)

    options = replace(_gemma(config), logit_softcap=config.optional_number("final_logit_softcapping"))
    return with_attention(options, change)


def _gemma(config: HuggingFaceConfig) -> DecoderOptions:
    """What Gemma 2 and 3 share: norms on both sides, (1 + w) norms, scaled and tied embeddings."""
    if config.flag("use_bidirectional_attention", False):
        raise ModelLoadError(
            f"{config.path}: use_bidirectional_attention is for encoders; only causal models are served"
        )
    options = llama(config)
    attention = replace(
        options.layers[0].attention,
        head_dim=config.integer("head_dim", 256),
        num_kv_heads=config.integer("num_key_value_heads", 4),
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )
    mlp = gated_mlp(config, "hidden_activation", "gelu_pytorch_tanh")
    return replace(
        options,
        layers=(LayerOptions(attention=attention, mlp=mlp, norms=SANDWICH_NORMS),) * options.num_layers,
        norm_weight_offset=1.0,
        embedding_scale=options.hidden_size**0.5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
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


def phi3(config: HuggingFaceConfig) -> DecoderOptions:
    """Rope over a part of each head; `su` and `yarn` in its files mean longrope."""
    options = replace(mistral(config), norm_eps=config.number("rms_norm_eps", 1e-5))
    if config.mapping("rope_scaling").get("type") not in ("su", "yarn"):
        return options
    return with_attention(options, lambda _, a: replace(a, rope=replace(a.rope, rope_type="longrope")))


def olmo2(config: HuggingFaceConfig) -> DecoderOptions:
    """Norms only after attention and MLP; query and key are normalised over all heads at once."""
    options = replace(llama(config), norm_eps=config.number("rms_norm_eps", 1e-5))
    options = replace(options, layers=tuple(replace(layer, norms=POST_NORMS) for layer in options.layers))
    return with_attention(options, lambda _, attention: replace(attention, query_key_norm="full_width"))


def gated_mlp(config: HuggingFaceConfig, activation_key: str, default_activation: str) -> GatedMlpOptions:
    return GatedMlpOptions(
        intermediate_size=config.integer("intermediate_size"),
        activation=_activation(config, activation_key, default_activation),
        bias=config.flag("mlp_bias", False),
    )


def with_attention(
    options: DecoderOptions, change: Callable[[int, GroupedQueryOptions], GroupedQueryOptions]
) -> DecoderOptions:
    """The same with each layer's attention changed, given the layer's index."""
    layers = (replace(layer, attention=change(index, layer.attention)) for index, layer in enumerate(options.layers))
    return replace(options, layers=tuple(layers))


def _activation(config: HuggingFaceConfig, key: str, default: str) -> Literal["silu", "gelu_tanh"]:
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"{config.path}: {key} {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def layer_types(config: HuggingFaceConfig, default: list[str]) -> list[str]:
    kinds = config.texts("layer_types") or default
    num_layers = config.integer("num_hidden_layers")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if len(kinds) != num_layers or unknown:
        raise ModelLoadError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers, unknown among them: "
            f"{unknown}; expected full_attention or sliding_attention for each layer"
        )
    return kinds
