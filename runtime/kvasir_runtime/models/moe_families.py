"""The known families with mixtures of experts: dense decoders whose MLPs are mixtures in some layers, or in all."""

from dataclasses import replace

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.models.dense_families import gated_mlp, layer_types, llama, mistral, with_attention
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.options import DecoderOptions, MoeOptions
from kvasir_runtime.models.rope import read_rope


def mixtral(config: HuggingFaceConfig) -> DecoderOptions:
    """A Mistral whose MLPs are all mixtures, on a longer rope."""
    options = replace(mistral(config), norm_eps=config.number("rms_norm_eps", 1e-5))
    rope = read_rope(config, options.layers[0].attention.head_dim, default_base=1_000_000.0)
    mixture = _mixture(config, top_k=2, renormalises=True, expert_size=config.integer("intermediate_size"))
    options = replace(options, layers=tuple(replace(layer, mlp=mixture) for layer in options.layers))
    return with_attention(options, lambda _, attention: replace(attention, rope=rope))


def qwen2_moe(config: HuggingFaceConfig) -> DecoderOptions:
    """A Qwen2 with an expert that every token goes to, besides those of its choice."""
    windows = _qwen2_moe_windows(config)
    qkv_bias = config.flag("qkv_bias", True)
    options = with_attention(
        llama(config),
        lambda index, attention: replace(attention, window=windows[index], qkv_bias=qkv_bias, output_bias=False),
    )
    shared_size = config.integer("shared_expert_intermediate_size", 5632)
    return _with_qwen_mixtures(config, options, top_k=4, expert_size=1408, shared_size=shared_size)


def qwen3_moe(config: HuggingFaceConfig) -> DecoderOptions:
    """Normalises query and key per head, as Qwen3 does; a window goes for every layer."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    options = with_attention(
        llama(config), lambda _, attention: replace(attention, window=window, query_key_norm="per_head")
    )
    return _with_qwen_mixtures(config, options, top_k=8, expert_size=768, shared_size=None)


def _qwen2_moe_windows(config: HuggingFaceConfig) -> list[int | None]:
    """Every other layer slides, the first among them, below `max_window_layers`: not as in Qwen2."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    last_sliding, num_layers = config.integer("max_window_layers", 28), config.integer("num_hidden_layers")
    default = ["sliding_attention" if i < last_sliding and i % 2 == 0 else "full_attention" for i in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in layer_types(config, default)]


def _with_qwen_mixtures(
    config: HuggingFaceConfig, options: DecoderOptions, *, top_k: int, expert_size: int, shared_size: int | None
) -> DecoderOptions:
    """Every `decoder_sparse_step`th layer is a mixture, but for `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    size = config.integer("moe_intermediate_size", expert_size)
    renormalises = config.flag("norm_topk_prob", False)
    mixture = _mixture(config, top_k=top_k, renormalises=renormalises, expert_size=size, shared_size=shared_size)
    layers = (
        layer if index in dense or (index + 1) % step else replace(layer, mlp=mixture)
        for index, layer in enumerate(options.layers)
    )
    return replace(options, layers=tuple(layers))


def _mixture(
    config: HuggingFaceConfig, *, top_k: int, renormalises: bool, expert_size: int, shared_size: int | None = None
) -> MoeOptions:
    """`top_k` where the file does not say."""
    mlp = gated_mlp(config, "hidden_act", "silu")
    num_experts = config.optional_integer("num_experts") or config.integer("num_local_experts")
    top_k = config.integer("num_experts_per_tok", top_k)
    if not 1 <= top_k <= num_experts:
        raise ModelLoadError(
            f"{config.path}: num_experts_per_tok is {top_k}, expected at least 1 and at most the {num_experts} experts"
        )
    return MoeOptions(
        num_experts=num_experts,
        top_k=top_k,
        renormalises=renormalises,
        expert=replace(mlp, intermediate_size=expert_size, bias=False),
        shared=None if shared_size is None else replace(mlp, intermediate_size=shared_size, bias=False),
    )
