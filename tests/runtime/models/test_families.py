"""What config.json leaves to convention: which layers slide, in files without `layer_types`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.kv_cache.spec import FULL, Reach
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.options import DecoderOptions, MoeOptions

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def options_of(architecture: str, **values: Any) -> DecoderOptions:
    config = HuggingFaceConfig(Path("config.json"), SHAPE | {"architectures": [architecture]} | values)
    return read_options(config)


def windows(architecture: str, **values: Any) -> list[int | None]:
    return [layer.attention.window for layer in options_of(architecture, **values).layers]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_slides_from_max_window_layers_on(architecture: str) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(architecture, **sliding, max_window_layers=3) == [None, None, None, 8]
    assert windows(architecture, **sliding, max_window_layers=0) == [8, 8, 8, 8]
    assert windows(architecture, **sliding, max_window_layers=4) == [None] * 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_ignores_a_window_that_is_switched_off(architecture: str) -> None:
    assert windows(architecture, sliding_window=8, max_window_layers=0, use_sliding_window=False) == [None] * 4
    assert windows(architecture, sliding_window=8, max_window_layers=0) == [None] * 4


def test_gemma2_slides_in_every_other_layer_beginning_with_the_first() -> None:
    assert windows("Gemma2ForCausalLM", sliding_window=8) == [8, None, 8, None]


def test_gemma3_sees_everything_in_each_last_layer_of_its_pattern() -> None:
    assert windows("Gemma3ForCausalLM", sliding_window=8, sliding_window_pattern=2) == [8, None, 8, None]
    assert windows("Gemma3ForCausalLM", sliding_window=8, _sliding_window_pattern=3) == [8, 8, None, 8]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_layer_types_go_before_any_convention(architecture: str) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    seen = windows(architecture, sliding_window=8, use_sliding_window=True, layer_types=kinds)
    assert seen == [None, None, 8, None]


def test_layer_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="layer_types has 1 entries for 4 layers"):
        options_of("Gemma2ForCausalLM", layer_types=["full_attention"])
    with pytest.raises(ModelLoadError, match=r"unknown among them: \['chunked_attention'\]"):
        options_of("Gemma2ForCausalLM", layer_types=["chunked_attention"] * 4)


def test_each_layer_says_what_it_keeps_in_the_kv_cache() -> None:
    layers = options_of("Gemma2ForCausalLM", sliding_window=8, head_dim=16).layers
    full, window = (spec for layer in layers[1::-1] for spec in layer.attention.kv_specs(torch.bfloat16))
    assert (full.reach, window.reach) == (FULL, Reach.window(8))
    assert (full.num_kv_heads, full.head_dims, full.dtype, full.itemsize) == (2, (16, 16), "bfloat16", 2)


def test_the_shortest_exact_length_of_any_layer_bounds_the_model() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    assert options_of("LlamaForCausalLM").max_exact_length == 64
    seen = options_of("Phi3ForCausalLM", rope_scaling=longrope, original_max_position_embeddings=16)
    assert seen.max_exact_length == 16


def test_a_draft_may_be_read_as_the_architecture_that_it_is_like() -> None:
    config = HuggingFaceConfig(Path("config.json"), SHAPE | {"architectures": ["LlamaForCausalLMEagle3"]})
    assert read_options(config, "LlamaForCausalLM").architecture == "LlamaForCausalLM"


def mixtures(architecture: str, **values: Any) -> list[bool]:
    layers = options_of(architecture, num_experts=8, **values).layers
    return [isinstance(layer.mlp, MoeOptions) for layer in layers]


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_qwen_mixes_experts_in_each_layer_of_its_step_but_those_named(architecture: str) -> None:
    assert mixtures(architecture) == [True] * 4
    assert mixtures(architecture, decoder_sparse_step=2) == [False, True, False, True]
    assert mixtures(architecture, decoder_sparse_step=2, mlp_only_layers=[1, 2]) == [False, False, False, True]


def test_only_qwen2_has_a_shared_expert() -> None:
    shared = {
        architecture: options_of(f"{architecture}ForCausalLM", num_experts=8).layers[0].mlp.shared
        for architecture in ("Mixtral", "Qwen2Moe", "Qwen3Moe")
    }
    assert {name: expert and expert.intermediate_size for name, expert in shared.items()} == {
        "Mixtral": None,
        "Qwen2Moe": 5632,
        "Qwen3Moe": None,
    }


def test_mixtral_always_renormalises_and_qwen_where_it_says_so() -> None:
    assert options_of("MixtralForCausalLM", num_local_experts=8).layers[0].mlp.renormalises
    assert not options_of("Qwen3MoeForCausalLM", num_experts=8).layers[0].mlp.renormalises
    assert options_of("Qwen3MoeForCausalLM", num_experts=8, norm_topk_prob=True).layers[0].mlp.renormalises


def test_qwen2_moe_slides_in_every_other_layer_below_max_window_layers() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8, "num_experts": 8}
    assert windows("Qwen2MoeForCausalLM", **sliding, max_window_layers=3) == [8, None, 8, None]
    assert windows("Qwen2MoeForCausalLM", **sliding, max_window_layers=2) == [8, None, None, None]
    assert windows("Qwen3MoeForCausalLM", **sliding) == [8] * 4


@pytest.mark.parametrize("top_k", [0, 9])
def test_more_experts_a_token_than_there_are_or_none_are_refused(top_k: int) -> None:
    with pytest.raises(ModelLoadError, match=f"num_experts_per_tok is {top_k}, expected at least 1 and at most the 8"):
        options_of("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=top_k)
