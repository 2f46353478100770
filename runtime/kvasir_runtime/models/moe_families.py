"""The known families with mixtures of experts: dense decoders whose MLPs are mixtures in some layers, or in all."""

from dataclasses import replace

from kvasir_runtime.models.dense_families import (
    gated_mlp,
    head_dim_of,
    llama,
    qwen_window,
    sliding_layers,
    with_attention,
)
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.options import DecoderOptions, GroupedQueryOptions, MoeOptions
from kvasir_runtime.models.rope import read_rope


def mixtral(config: HuggingFaceConfig) -> DecoderOptions:
    """A Llama whose MLPs are all mixtures, on a longer rope."""
    rope = read_rope(config, head_dim_of(config), default_base=1_000_000.0)
    options = llama(config, default_kv_heads=8, default_eps=1e-5, rope=rope)
    window = config.optional_integer("sliding_window", None)
    size = config.integer("intermediate_size")
    mixture = _mixture(config, num_experts=8, top_k=2, renormalises=True, expert_size=size)
    options = replace(options, layers=tuple(replace(layer, mlp=mixture) for layer in options.layers))
    return with_attention(options, lambda _, attention: replace(attention, window=window))


def qwen2_moe(config: HuggingFaceConfig) -> DecoderOptions:
    """A Qwen2 with an expert that every token goes to, besides those of its choice. Every other layer slides, the first
    among them, below `max_window_layers`: not as in Qwen2."""
    window, last_sliding = qwen_window(config), config.integer("max_window_layers", 28, least=0)
    slides = sliding_layers(config, lambda index: index < last_sliding and index % 2 == 0)
    qkv_bias = config.flag("qkv_bias", True)

    def change(index: int, attention: GroupedQueryOptions) -> GroupedQueryOptions:
        return replace(attention, window=window if slides[index] else None, qkv_bias=qkv_bias, output_bias=False)

    options = with_attention(llama(config, default_kv_heads=16), change)
    shared_size = config.integer("shared_expert_intermediate_size", 5632)
    mixture = _qwen_mixture(config, num_experts=60, top_k=4, expert_size=1408, shared_size=shared_size)
    return _with_mixtures(config, options, mixture)


def qwen3_moe(config: HuggingFaceConfig) -> DecoderOptions:
    """Normalises query and key per head, as Qwen3 does; a window goes for every layer."""
    window = qwen_window(config)
    options = with_attention(
        llama(config, default_kv_heads=4),
        lambda _, attention: replace(attention, window=window, query_key_norm="per_head"),
    )
    return _with_mixtures(config, options, _qwen_mixture(config, num_experts=128, top_k=8, expert_size=768))


def _qwen_mixture(
    config: HuggingFaceConfig, *, num_experts: int, top_k: int, expert_size: int, shared_size: int | None = None
) -> MoeOptions:
    return _mixture(
        config,
        num_experts=num_experts,
        top_k=top_k,
        renormalises=config.flag("norm_topk_prob", False),
        expert_size=config.integer("moe_intermediate_size", expert_size),
        shared_size=shared_size,
    )


def _with_mixtures(config: HuggingFaceConfig, options: DecoderOptions, mixture: MoeOptions) -> DecoderOptions:
    """Every `decoder_sparse_step`th layer is a mixture, but for `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    layers = (
        layer if index in dense or (index + 1) % step else replace(layer, mlp=mixture)
        for index, layer in enumerate(options.layers)
    )
    return replace(options, layers=tuple(layers))


def _mixture(
    config: HuggingFaceConfig,
    *,
    num_experts: int,
    top_k: int,
    renormalises: bool,
    expert_size: int,
    shared_size: int | None = None,
) -> MoeOptions:
    """`num_experts` and `top_k` where the file does not say."""
    mlp = gated_mlp(config, "hidden_act", "silu")
    num_experts = config.integer("num_experts", config.integer("num_local_experts", num_experts))
    top_k = config.integer("num_experts_per_tok", top_k)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"at most the {num_experts} experts")
    return MoeOptions(
        num_experts=num_experts,
        top_k=top_k,
        renormalises=renormalises,
        expert=replace(mlp, intermediate_size=expert_size, bias=False),
        shared=None if shared_size is None else replace(mlp, intermediate_size=shared_size, bias=False),
    )
