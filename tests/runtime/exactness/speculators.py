"""What each method of speculation drafts with: the target itself as a draft model, and heads of random weights.

The one drafts always right, the others nearly always wrong, and both must come to the same tokens. Heads that are right
now and then are in `repeating_heads`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvasir_runtime.config import SpeculativeConfig

METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3")
NUM_DRAFTS = 3
HeadMaker = Callable[[Path, Path], None]
"""Writes a head's checkpoint into the first folder, for the target in the second."""


def speculative_config(
    method: str, target: Path, draft: Path, folder: Path, makers: Mapping[str, HeadMaker] | None = None
) -> SpeculativeConfig:
    """Always the full depth, so that drafts are really verified; heads are made in `folder` when first asked for, of
    random weights unless `makers` says otherwise."""
    make = (RANDOM_HEADS if makers is None else makers).get(method)
    model = draft if method == "draft_model" else None
    if make is not None:
        model = folder / method
        if not model.exists():
            model.mkdir(parents=True)
            make(model, target)
    return SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        model=None if model is None else str(model),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive=False,
    )


def _medusa(folder: Path, target: Path) -> None:
    config = config_of(target)
    size, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_DRAFTS):
        shapes |= {f"{head}.0.linear.weight": (size, size), f"{head}.0.linear.bias": (size,)}
        shapes |= {f"{head}.1.weight": (vocab, size)}
    save(folder, medusa_config(target), random_weights(shapes))


def _eagle(folder: Path, target: Path) -> None:
    save(folder, eagle_config(target), random_weights(eagle_shapes(target)))


def _eagle3(folder: Path, target: Path) -> None:
    save(folder, eagle3_config(target), random_weights(eagle3_shapes(target)))


RANDOM_HEADS: dict[str, HeadMaker] = {"medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}


def config_of(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def medusa_config(target: Path) -> dict[str, Any]:
    size = config_of(target)["hidden_size"]
    return {"medusa_num_heads": NUM_DRAFTS, "medusa_num_layers": 1, "hidden_size": size}


def eagle_config(target: Path) -> dict[str, Any]:
    """A Llama of one layer."""
    config = config_of(target)
    kept = ("vocab_size", "hidden_size", "max_position_embeddings")
    return {name: config[name] for name in kept} | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64,
    }  # fmt: skip


def eagle3_config(target: Path) -> dict[str, Any]:
    config = eagle_config(target) | {"draft_vocab_size": config_of(target)["vocab_size"]}
    return config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


def eagle_shapes(target: Path) -> dict[str, tuple[int, ...]]:
    size = config_of(target)["hidden_size"]
    norm = {"layers.0.post_attention_layernorm.weight": (size,)}
    return {"fc.weight": (size, 2 * size)} | layer_shapes("layers.0", size, size) | norm


def eagle3_shapes(target: Path) -> dict[str, tuple[int, ...]]:
    size, vocab = config_of(target)["hidden_size"], config_of(target)["vocab_size"]
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {"fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (vocab, size)}
    return shapes | layer_shapes("midlayer", 2 * size, size) | {f"midlayer.{norm}.weight": (size,) for norm in norms}


def layer_shapes(prefix: str, size_in: int, size: int) -> dict[str, tuple[int, ...]]:
    head = size // 4
    return {
        f"{prefix}.self_attn.q_proj.weight": (4 * head, size_in),
        f"{prefix}.self_attn.k_proj.weight": (2 * head, size_in),
        f"{prefix}.self_attn.v_proj.weight": (2 * head, size_in),
        f"{prefix}.self_attn.o_proj.weight": (size, 4 * head),
        f"{prefix}.mlp.gate_proj.weight": (64, size),
        f"{prefix}.mlp.up_proj.weight": (64, size),
        f"{prefix}.mlp.down_proj.weight": (size, 64),
    }


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
