"""Medusa heads against their definition, in the layout of public checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.runtime.speculative.conftest import PLACEMENT, SHAPE, Rank, hidden_states, prompt
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.errors import CheckpointError, ConfigurationError
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.speculative.medusa import load_medusa

NUM_HEADS, NUM_LAYERS = 3, 2


def head_tensors(with_lm_head: bool) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    size, tensors = SHAPE["hidden_size"], {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(size, size, generator=random) * 0.3
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(size, generator=random) * 0.3
        if with_lm_head:
            tensors[f"{head}.{NUM_LAYERS}.weight"] = torch.randn(SHAPE["vocab_size"], size, generator=random)
    return tensors


def write_heads(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_LAYERS, "hidden_size": SHAPE["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain_drafts(tensors: dict[str, Tensor], hidden: Tensor, lm_head: Tensor) -> list[int]:
    drafts = []
    for head in range(NUM_HEADS):
        x = hidden
        for layer in range(NUM_LAYERS):
            name = f"{head}.{layer}.linear"
            x = x + functional.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        drafts.append(int((tensors.get(f"{head}.{NUM_LAYERS}.weight", lm_head) @ x).argmax()))
    return drafts


@pytest.mark.parametrize("with_lm_head", [True, False])
def test_each_head_drafts_from_the_last_hidden_state_that_holds(
    tmp_path: Path, target: Decoder, hf_target: transformers.LlamaForCausalLM, with_lm_head: bool
) -> None:
    tensors = head_tensors(with_lm_head)
    rank = Rank(target, load_medusa(write_heads(tmp_path, tensors), target, PLACEMENT, num_drafts=NUM_HEADS))
    rank.add(0, prompt(5, seed=0))
    rank.add(1, prompt(9, seed=1))
    rank.step([], {0: 5, 1: 4}, num_proposals=3)
    rank.step([0], {1: 5}, num_proposals=3)
    for num_proposals in (3, 1, 0, 3):
        rank.step([1, 0], {}, num_proposals)
        for row in (0, 1):
            hidden = hidden_states(hf_target, rank.tokens(row))[-1][-2]
            expected = plain_drafts(tensors, hidden, hf_target.lm_head.weight.detach())
            assert rank.drafts[row] == expected[:num_proposals]


def test_more_drafts_than_heads_are_refused(tmp_path: Path, target: Decoder) -> None:
    folder = write_heads(tmp_path, head_tensors(True))
    with pytest.raises(ConfigurationError, match="holds 3 Medusa heads, but num_speculative_tokens is 4"):
        load_medusa(folder, target, PLACEMENT, num_drafts=4)


def test_heads_of_another_hidden_size_are_refused(tmp_path: Path, target: Decoder) -> None:
    folder = write_heads(tmp_path, head_tensors(True), hidden_size=48)
    with pytest.raises(ConfigurationError, match="size 48, the target's have size 32"):
        load_medusa(folder, target, PLACEMENT, num_drafts=1)


def test_a_tensor_that_no_head_uses_is_refused(tmp_path: Path, target: Decoder) -> None:
    folder = write_heads(tmp_path, head_tensors(True) | {"3.0.linear.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"3\.0\.linear\.weight"):
        load_medusa(folder, target, PLACEMENT, num_drafts=1)
