"""The known families of dense decoders: each is one function from a Hugging Face config.json to `DecoderOptions`.

What a file does not say is what transformers' class for the family says; a null is a value of its own where that class
makes a difference (`sliding_window`, `num_key_value_heads`, soft-caps).
"""

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
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS, _MOST_HEAD_DIM = 4096, 1024
"""Far beyond any model: a number in the wrong place is refused before memory is taken for it."""


def llama(
    config: HuggingFaceConfig,
    *,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    default_eps: float = 1e-6,
    rope: RopeOptions | None = None,
) -> DecoderOptions:
    """The plain pre-norm decoder that the others vary. A `default_` is for files without the key; None: as many KV
    heads as heads, or an equal part of the hidden size for each of them."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.optional_integer("num_key_value_heads", default_kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of the {num_heads} num_attention_heads")
    head_dim = head_dim_of(config, default_head_dim)
    bias = config.flag("attention_bias", False)
    attention = GroupedQueryOptions(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        softcap=None,
        window=None,
        rope=read_rope(config, head_dim) if rope is None else rope,
        query_key_norm=None,
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = LayerOptions(attention=attention, mlp=gated_mlp(config, "hidden_act", "silu"), norms=PRE_NORMS)
    return DecoderOptions(
        architecture="LlamaForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        layers=(layer,) * _num_layers(config),
        norm_eps=config.number("rms_norm_eps", default_eps),
        norm_weight_offset=0.0,
        logit_softcap=None,
        embedding_scale=None,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        quantization=config.object("quantization_config").values or None,
    )


def mistral(config: HuggingFaceConfig) -> DecoderOptions:
    """Every layer slides, unless the window is null."""
    window = config.optional_integer("sliding_window", 4096)
    options = llama(config, default_kv_heads=8)
    return with_attention(options, lambda _, attention: replace(attention, window=window))


def qwen2(config: HuggingFaceConfig) -> DecoderOptions:
    windows = _qwen_windows(config)
    return with_attention(
        llama(config, default_kv_heads=32),
        lambda index, attention: replace(attention, window=windows[index], qkv_bias=True, output_bias=False),
    )


def qwen3(config: HuggingFaceConfig) -> DecoderOptions:
    """Normalises query and key per head; its head size does not follow from the hidden size."""
    windows = _qwen_windows(config)
    return with_attention(
        llama(config, default_head_dim=128, default_kv_heads=32),
        lambda index, attention: replace(attention, window=windows[index], query_key_norm="per_head"),
    )


def qwen_window(config: HuggingFaceConfig) -> int | None:
    """Of the layers that slide."""
    return config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None


def _qwen_windows(config: HuggingFaceConfig) -> list[int | None]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says which do."""
    window, first_sliding = qwen_window(config), config.integer("max_window_layers", 28, least=0)
    return [window if slides else None for slides in sliding_layers(config, lambda index: index >= first_sliding)]


def gemma2(config: HuggingFaceConfig) -> DecoderOptions:
    """Soft-caps attention and logits; every other layer slides, the first among them."""
    head_dim = head_dim_of(config, 256)
    full, sliding = (read_rope(config, head_dim, layer_type=layer_type) for layer_type in (_FULL, _SLIDING))
    options = _gemma(config, sliding_layers(config, lambda index: index % 2 == 0), full, sliding)
    softcap = config.optional_number("attn_logit_softcapping", 50.0)
    options = with_attention(options, lambda _, attention: replace(attention, softcap=softcap))
    return replace(options, logit_softcap=config.optional_number("final_logit_softcapping", 30.0))


def gemma3(config: HuggingFaceConfig) -> DecoderOptions:
    """Query and key norms instead of the attention soft-cap, and sliding layers with a rope of their own."""
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    full = read_rope(config, head_dim_of(config, 256), layer_type=_FULL, default_base=1_000_000.0)
    options = _gemma(
        config, sliding_layers(config, lambda index: (index + 1) % pattern > 0), full, _gemma3_sliding_rope(config)
    )
    options = with_attention(options, lambda _, attention: replace(attention, query_key_norm="per_head"))
    return replace(options, logit_softcap=config.optional_number("final_logit_softcapping", None))


def _gemma(config: HuggingFaceConfig, slides: list[bool], full: RopeOptions, sliding: RopeOptions) -> DecoderOptions:
    """What Gemma 2 and 3 share: norms on both sides, (1 + w) norms, scaled and tied embeddings. Each kind of layer has
    its rope."""
    if config.flag("use_bidirectional_attention", False):
        raise ModelLoadError(
            f"{config.path}: use_bidirectional_attention is for encoders; only causal models are served"
        )
    options = llama(config, default_head_dim=256, default_kv_heads=4, rope=full)
    window = config.optional_integer("sliding_window", 4096)
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    mlp = gated_mlp(config, "hidden_activation", "gelu_pytorch_tanh")

    def layer(options: LayerOptions, is_sliding: bool) -> LayerOptions:
        attention = replace(options.attention, scale=scale)
        if is_sliding:
            attention = replace(attention, window=window, rope=sliding)
        return LayerOptions(attention=attention, mlp=mlp, norms=SANDWICH_NORMS)

    return replace(
        options,
        layers=tuple(map(layer, options.layers, slides)),
        norm_weight_offset=1.0,
        embedding_scale=options.hidden_size**0.5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gemma3_sliding_rope(config: HuggingFaceConfig) -> RopeOptions:
    """Older files keep the sliding layers' base beside the full layers' parameters, and never scale it."""
    head_dim, base = head_dim_of(config, 256), config.number("rope_local_base_freq", 10_000.0)
    if _SLIDING in config.object("rope_parameters").values:
        return read_rope(config, head_dim, layer_type=_SLIDING, default_base=base)
    unscaled = {"max_position_embeddings": config.values.get("max_position_embeddings"), "rope_theta": base}
    return read_rope(replace(config, values=unscaled), head_dim)


def phi3(config: HuggingFaceConfig) -> DecoderOptions:
    """Rope over a part of each head; `su` and `yarn` in its files mean longrope."""
    rope = read_rope(config, head_dim_of(config), synonyms={"su": "longrope", "yarn": "longrope"})
    options, window = llama(config, default_eps=1e-5, rope=rope), config.optional_integer("sliding_window", None)
    return with_attention(options, lambda _, attention: replace(attention, window=window))


def olmo2(config: HuggingFaceConfig) -> DecoderOptions:
    """Norms only after attention and MLP; query and key are normalised over all heads at once."""
    options = llama(config, default_eps=1e-5)
    options = replace(options, layers=tuple(replace(layer, norms=POST_NORMS) for layer in options.layers))
    return with_attention(options, lambda _, attention: replace(attention, query_key_norm="full_width"))


def head_dim_of(config: HuggingFaceConfig, default: int | None = None) -> int:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if default is None and hidden_size % num_heads == 0:
        default = hidden_size // num_heads
    return config.integer("head_dim", default, most=_MOST_HEAD_DIM)


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


def _num_layers(config: HuggingFaceConfig) -> int:
    return config.integer("num_hidden_layers", most=_MOST_LAYERS)


def sliding_layers(config: HuggingFaceConfig, slides: Callable[[int], bool]) -> list[bool]:
    """Of each layer whether it slides: `layer_types` says, or by its index the family's convention."""
    num_layers, kinds = _num_layers(config), config.texts("layer_types")
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if kinds and (len(kinds) != num_layers or unknown):
        raise ModelLoadError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers, unknown among them: "
            f"{unknown}; expected full_attention or sliding_attention for each layer"
        )
    return [kind == _SLIDING for kind in kinds] or [slides(index) for index in range(num_layers)]
