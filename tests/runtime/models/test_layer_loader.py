"""A draft is loaded from the parts that load a decoder, under names and sizes of its own: here as EAGLE-3 has them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvasir_runtime.kernels.ops import reference_ops
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.dense_layer import GroupedQueryAttention
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.module_loader import make_module_loader
from kvasir_runtime.models.placement import Placement

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SHAPES = {
    "fc.weight": (32, 96),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "midlayer.hidden_norm.weight": (32,),
    "lm_head.weight": (24, 32),
}
PLACEMENT = Placement(device=torch.device("cpu"), dtype=torch.float32, ops=reference_ops())


def test_an_eagle3_draft_is_built_from_the_same_parts(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    draft_to_target = torch.arange(24) * 2
    save_file(tensors | {"d2t": draft_to_target}, tmp_path / "model.safetensors")
    options = read_options(HuggingFaceConfig(tmp_path / "config.json", CONFIG), "LlamaForCausalLM")
    hidden, wide = torch.randn(3, 32, generator=random), torch.randn(3, 96, generator=random)
    with Checkpoint(tmp_path) as checkpoint:
        modules = make_module_loader(checkpoint, options, PLACEMENT, num_positions=16)
        layers = LayerLoader(modules, LayerNames(), options.hidden_size)
        attention = layers.attention("midlayer", options.layers[0].attention, in_features=64)
        mlp = layers.mlp("midlayer", options.layers[0].mlp)
        fusion, head = modules.linear(["fc"], [32], 96), modules.linear(["lm_head"], [24], 32)
        norm = modules.norm("midlayer.hidden_norm", 32)
        mapping = checkpoint.take("d2t", (24,)).clone()
        checkpoint.check_all_taken(ignored=())
    assert isinstance(attention, GroupedQueryAttention)
    assert attention.qkv(torch.cat((hidden, hidden), -1)).shape == (3, 64)
    assert mlp(norm(hidden)).shape == (3, 32)
    torch.testing.assert_close(fusion(wide), wide @ tensors["fc.weight"].T)
    torch.testing.assert_close(head(hidden), hidden @ tensors["lm_head.weight"].T)
    assert torch.equal(mapping, draft_to_target)
