"""A tiny Llama checkpoint, written without transformers, that tests may spoil."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def llama_tensors() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 32),
        "lm_head.weight": (64, 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return llama_tensors()


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write config.json and weights; `shards` lists names of tensors per file."""

    def write(tensors: dict[str, torch.Tensor], shards: int = 1, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        if shards == 1:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path
        weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(weight_map.values()):
            save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return write
