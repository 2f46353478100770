"""Frequencies of every rope scaling equal those of transformers, from new and from old names in config.json."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvasir_runtime.errors import ModelLoadError
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.rope import read_rope, rope_tables

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16.0,
        "truncate": False,
    },
]


def config_of(**values: Any) -> HuggingFaceConfig:
    return HuggingFaceConfig(Path("config.json"), {"max_position_embeddings": 1024, **values})


def expected_tables(config: Any, rope_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config)
    angles = torch.outer(torch.arange(200.0), frequencies)
    return torch.cat((angles, angles), -1).cos() * factor, torch.cat((angles, angles), -1).sin() * factor


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(scaling["rope_type"]))
@pytest.mark.parametrize("names", ["new", "old"])
def test_tables_equal_those_of_transformers(scaling: dict[str, Any], names: str) -> None:
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={**scaling, "rope_theta": 50_000.0},
    )
    if names == "new":
        ours = config_of(rope_parameters={**scaling, "rope_theta": 50_000.0})
    else:
        old = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
        ours = config_of(rope_scaling=old, rope_theta=50_000.0)
    tables = rope_tables(read_rope(ours, head_dim=32), 200, torch.device("cpu"))
    for seen, wanted in zip(tables, expected_tables(theirs, scaling["rope_type"]), strict=True):
        torch.testing.assert_close(seen, wanted, atol=2e-5, rtol=0)


def test_longrope_is_exact_up_to_the_original_context() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [3.0] * 8, "rope_theta": 10_000.0}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024}
    theirs = Phi3Config(**shape, original_max_position_embeddings=256, rope_parameters=dict(scaling), pad_token_id=0)
    rope = read_rope(config_of(original_max_position_embeddings=256, rope_parameters=scaling), head_dim=16)
    assert rope.max_exact_length == 256
    tables = rope_tables(rope, 200, torch.device("cpu"))
    for seen, wanted in zip(tables, expected_tables(theirs, "longrope"), strict=True):
        torch.testing.assert_close(seen, wanted, atol=2e-5, rtol=0)


def test_gemma3_gives_its_sliding_layers_a_rope_of_their_own() -> None:
    values = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "head_dim": 16,
    }
    old = config_of(
        **values, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    new = config_of(
        **values,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    sliding, full = (read_rope(config_of(rope_theta=base), head_dim=16).frequencies for base in (1e4, 1e6))
    for options in (read_options(old), read_options(new)):
        *others, last = (layer.attention.rope.frequencies for layer in options.layers)
        assert others == [sliding] * 5
        assert last == pytest.approx([frequency / 8 for frequency in full])
        assert options.layers[5].attention.window is None


def test_a_scaling_without_its_numbers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"'rope_scaling\.factor' is missing"):
        read_rope(config_of(rope_scaling={"rope_type": "linear"}), head_dim=16)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": ["linear"]}, r"'rope_scaling\.rope_type' is \['linear'\], expected a string"),
        ({"rope_type": "linear", "factor": 0}, r"'rope_scaling\.factor' is 0, expected a number above 0"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7}, "'rope_scaling.short_factor' .* a list of 8 numbers"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7 + [None]}, "'rope_scaling.short_factor'"),
        (
            {"rope_type": "linear", "factor": 2, "rope_theta": 1e-300},
            "'rope_scaling.rope_theta' is 1e-300, expected a number above 0",
        ),
        ({**YARN, "rope_theta": 1}, "no frequencies .* division by zero"),
        ({**YARN, "truncate": "no"}, r"'rope_scaling\.truncate' is 'no', expected true or false"),
        ({**YARN, "partial_rotary_factor": 1.5}, "24 of the 16 numbers of a head turn"),
        ({**YARN, "partial_rotary_factor": 0.2}, "3 of the 16 numbers of a head turn"),
    ],
)
def test_numbers_that_make_no_rope_are_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{message}"):
        read_rope(config_of(rope_scaling=scaling), head_dim=16)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [({}, 1024), (YARN, 1024), ({**YARN, "factor": 8}, 2048), ({"type": "linear", "factor": 2}, 2048)],
)
def test_a_scaling_may_reach_beyond_the_positions_that_the_file_names(scaling: dict[str, Any], longest: int) -> None:
    assert read_rope(config_of(rope_scaling=scaling), head_dim=16).max_length == longest


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_other_names(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.1] * 8, "long_factor": [3.0] * 8}
    shape = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 4}
    options = read_options(
        config_of(
            **shape, architectures=["Phi3ForCausalLM"], num_hidden_layers=1, rope_scaling=scaling,
            original_max_position_embeddings=256,
        )
    )  # fmt: skip
    assert options.max_exact_length == options.max_length == 256
