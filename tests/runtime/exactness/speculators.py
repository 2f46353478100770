"""What each method of speculation drafts with: the target itself as a draft model, and heads of random weights.

The one drafts always right, the others nearly always wrong, and both must come to the same tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvasir_runtime.config import SpeculativeConfig

METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3")
NUM_DRAFTS = 3


def speculative_config(method: str, target: Path, draft: Path, folder: Path) -> SpeculativeConfig:
    """Always the full depth, so that drafts are really verified; heads are made in `folder` when first asked for."""
    make = {"medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}.get(method)
    model = draft if method == "draft_model" else None
    if make is not None:
        model = folder / method
        if not model.exists():
            model.mkdir(parents=True)
            make(model, json.loads((target / "config.json").read_text()))
    return SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        model=None if model is None else str(model),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive=False,
    )


def _medusa(folder: Path, target: dict[str, Any]) -> None:
    size, vocab = target["hidden_size"], target["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_DRAFTS):
        shapes |= {f"{head}.0.linear.weight": (size, size), f"{head}.0.linear.bias": (size,)}
        shapes |= {f"{head}.1.weight": (vocab, size)}
    _save(folder, {"medusa_num_heads": NUM_DRAFTS, "medusa_num_layers": 1, "hidden_size": size}, shapes)


def _eagle(folder: Path, target: dict[str, Any]) -> None:
    size = target["hidden_size"]
    layer = _layer("layers.0", size, size) | {"layers.0.post_attention_layernorm.weight": (size,)}
    _save(folder, _llama(target), {"fc.weight": (size, 2 * size)} | layer)


def _eagle3(folder: Path, target: dict[str, Any]) -> None:
    size = target["hidden_size"]
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {"fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (target["vocab_size"], size)}
    shapes |= _layer("midlayer", 2 * size, size) | {f"midlayer.{norm}.weight": (size,) for norm in norms}
    config = _llama(target) | {"draft_vocab_size": target["vocab_size"]}
    _save(folder, config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, shapes)


def _llama(target: dict[str, Any]) -> dict[str, Any]:
    kept = ("vocab_size", "hidden_size", "max_position_embeddings")
    return {name: target[name] for name in kept} | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64,
    }  # fmt: skip


def _layer(prefix: str, size_in: int, size: int) -> dict[str, tuple[int, ...]]:
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


def _save(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
