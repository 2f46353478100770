"""Drafts that say again what was said last: right where a text repeats itself, as that of a small random model does.

A head's layer, which adds nothing to what enters it, hands the target's own states on to the logits.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from tests.runtime.exactness.speculators import (
    NUM_DRAFTS,
    HeadMaker,
    config_of,
    eagle3_config,
    eagle3_shapes,
    eagle_config,
    eagle_shapes,
    layer_shapes,
    medusa_config,
    random_weights,
    save,
)


def repeating_draft(folder: Path, target: Path) -> Path:
    """A model with full attention, whatever the target's: with tied embeddings, it finds the newest token likeliest."""
    if not folder.exists():
        folder.mkdir(parents=True)
        config = eagle_config(target) | {"tie_word_embeddings": True}
        size, layer = config["hidden_size"], "model.layers.0"
        shapes = {"model.embed_tokens.weight": (config["vocab_size"], size)} | layer_shapes(layer, size, size)
        ones = {f"{layer}.{norm}.weight": torch.ones(size) for norm in ("input_layernorm", "post_attention_layernorm")}
        save(folder, config, _adding_nothing(shapes) | ones | {"model.norm.weight": torch.ones(size)})
    return folder


def _medusa(folder: Path, target: Path) -> None:
    """The target's lm head serves, as no head has its own."""
    size = config_of(target)["hidden_size"]
    blocks = {f"{head}.0.linear.weight": torch.zeros(size, size) for head in range(NUM_DRAFTS)}
    save(folder, medusa_config(target), blocks)


def _eagle(folder: Path, target: Path) -> None:
    """Every entry is the target's last hidden state, of which the newest token came."""
    weights = _adding_nothing(eagle_shapes(target))
    size = len(weights["fc.weight"])
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    save(folder, eagle_config(target), weights)


def _eagle3(folder: Path, target: Path) -> None:
    """Every entry is the embedding that enters the target's first layer, of the token before the newest."""
    weights = _adding_nothing(eagle3_shapes(target))
    size = len(weights["fc.weight"])
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, 2 * size)], 1)
    weights["norm.weight"] = torch.ones(size)
    with safe_open(target / "model.safetensors", "pt") as checkpoint:
        weights["lm_head.weight"] = checkpoint.get_tensor("model.embed_tokens.weight")
    save(folder, eagle3_config(target), weights)


REPEATING_HEADS: dict[str, HeadMaker] = {"medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}


def _adding_nothing(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random weights, but for the layer's outputs."""
    weights = random_weights(shapes)
    return {name: weight * 0 if "o_proj" in name or "down_proj" in name else weight for name, weight in weights.items()}
