"""What config.json leaves to convention: which layers slide, in files without `layer_types`."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.kv_cache.spec import FULL, Reach
from kvasir_runtime.models.families import FAMILIES, read_options
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


@pytest.mark.parametrize(
    ("architecture", "when_missing"),
    [("Mistral", 4096), ("Mixtral", None), ("Phi3", None), ("Qwen2", 4096), ("Qwen3", 4096), ("Gemma2", 4096)],
)
def test_a_window_of_null_is_none_and_one_that_is_missing_is_the_familys(
    architecture: str, when_missing: int | None
) -> None:
    convention = {"use_sliding_window": True, "max_window_layers": 0}
    assert windows(f"{architecture}ForCausalLM", **convention)[0] == when_missing
    assert windows(f"{architecture}ForCausalLM", **convention, sliding_window=None) == [None] * 4
    assert windows(f"{architecture}ForCausalLM", **convention, sliding_window=8)[0] == 8


@pytest.mark.parametrize(("architecture", "when_missing"), [("Llama", 4), ("Mistral", 8), ("Qwen2", 32)])
def test_kv_heads_of_null_are_all_heads_and_those_missing_the_familys(architecture: str, when_missing: int) -> None:
    def kv_heads(num_heads: int, **values: Any) -> int:
        config = SHAPE | {"architectures": [f"{architecture}ForCausalLM"], "num_attention_heads": num_heads, **values}
        config = {name: value for name, value in config.items() if value != "missing"}
        return read_options(HuggingFaceConfig(Path("config.json"), config)).layers[0].attention.num_kv_heads

    assert kv_heads(when_missing, num_key_value_heads="missing", head_dim=8) == when_missing
    assert kv_heads(4, num_key_value_heads=None) == 4
    with pytest.raises(ModelLoadError, match="'num_key_value_heads' is 3, expected a divisor of the 4"):
        kv_heads(4, num_key_value_heads=3)


class ReadKeys(dict[str, Any]):
    """Remembers which of its keys were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


NUMBERS: list[Any] = [-1, 0, 0.5, 2**31, 2**70, 1e300, 1e-300, float("nan"), float("inf")]
WRONG = [*NUMBERS, True, "x", "8", [], [None], {}, {"a": 1}]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_value_of_any_key_does_worse_than_be_refused_by_name(architecture: str) -> None:
    shape = SHAPE | {"architectures": [architecture], "num_experts": 16, "use_sliding_window": True}
    read = ReadKeys(shape)
    read_options(HuggingFaceConfig(Path("folder/config.json"), read))
    refusals: list[tuple[str, str]] = []
    for name, value in itertools.product(read.names, WRONG):
        try:
            read_options(HuggingFaceConfig(Path("folder/config.json"), shape | {name: value}))
        except ModelLoadError as error:
            refusals.append((name, str(error)))
    assert {name for name, _ in refusals} == read.names
    assert [text for _, text in refusals if not text.startswith("folder/config.json: ")] == []
    assert {name for name, text in refusals if name not in text} <= {
        "hidden_size",
        "num_attention_heads",
    }  # of head_dim


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
    with pytest.raises(ModelLoadError, match=f"'num_experts_per_tok' is {top_k}, expected "):
        options_of("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=top_k)
