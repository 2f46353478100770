"""Medusa heads against their definition, in the layouts of public checkpoints.

FasterDecoding/Medusa saves `medusa_lm_head.pt`, later `.safetensors` (medusa/train/train_legacy.py), and its own loader
counts five heads where config.json says two (medusa/model/medusa_model.py). vLLM renames the tensors and knows a map of
the commonest tokens (vllm/model_executor/models/medusa.py).
"""

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


def write_heads(
    folder: Path, tensors: dict[str, Tensor], name: str = "medusa_lm_head.safetensors", **changes: Any
) -> Path:
    """`config.json` as published, with too few heads."""
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": NUM_LAYERS} | changes))
    save: Any = torch.save if name.endswith(".pt") else save_file
    save(tensors, folder / name)
    return folder


def in_vllms_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *_, kind = name.split(".")
        module = f"blocks.{head}.layers.{layer}" if "linear" in name else f"lm_heads.{head}"
        renamed[f"{module}.{kind}"] = tensor
    return renamed


def drafts_of(folder: Path, target: Decoder) -> list[list[int]]:
    """Of a few steps."""
    rank = Rank(target, load_medusa(folder, target, PLACEMENT, num_drafts=NUM_HEADS))
    rank.add(0, prompt(9, seed=2))
    rank.step([], {0: 9}, NUM_HEADS)
    drafts = []
    for _ in range(6):
        drafts.append(rank.drafts[0])
        rank.step([0], {}, NUM_HEADS)
    return drafts


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


@pytest.mark.parametrize("with_lm_head", [True, False])
@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_the_authors_files_draft_as_safetensors_do(
    tmp_path: Path, target: Decoder, name: str, with_lm_head: bool
) -> None:
    (plain := tmp_path / "plain").mkdir()
    tensors = head_tensors(with_lm_head)
    expected = drafts_of(write_heads(plain, tensors, "model.safetensors"), target)
    assert drafts_of(write_heads(tmp_path, tensors, name), target) == expected


@pytest.mark.parametrize("with_lm_head", [True, False])
def test_vllms_names_draft_as_the_authors_do(tmp_path: Path, target: Decoder, with_lm_head: bool) -> None:
    (plain := tmp_path / "plain").mkdir()
    tensors = head_tensors(with_lm_head)
    config = {"num_heads": NUM_HEADS, "num_hidden_layers": NUM_LAYERS, "model_type": "medusa"}
    folder = write_heads(tmp_path, in_vllms_names(tensors), "model.safetensors", **config)
    assert drafts_of(folder, target) == drafts_of(write_heads(plain, tensors), target)


def test_blocks_without_a_bias_have_none(tmp_path: Path, target: Decoder) -> None:
    """vLLM's medusa_fc_bias is false unless it is set."""
    (plain := tmp_path / "plain").mkdir()
    tensors = head_tensors(True)
    zeros = {name: torch.zeros_like(tensor) if "bias" in name else tensor for name, tensor in tensors.items()}
    bare = {name: tensor for name, tensor in in_vllms_names(tensors).items() if "bias" not in name}
    assert drafts_of(write_heads(tmp_path, bare), target) == drafts_of(write_heads(plain, zeros), target)


@pytest.mark.parametrize("shared", ["lm_head.weight", "lm_heads.0.weight"])
def test_heads_may_share_an_lm_head(tmp_path: Path, target: Decoder, shared: str) -> None:
    (plain := tmp_path / "plain").mkdir()
    tensors = head_tensors(True)
    first = tensors[f"0.{NUM_LAYERS}.weight"]
    each = {name: first if name.endswith(f".{NUM_LAYERS}.weight") else tensor for name, tensor in tensors.items()}
    one = {name: tensor for name, tensor in in_vllms_names(tensors).items() if "lm_heads" not in name} | {shared: first}
    folder = write_heads(tmp_path, one, original_lm_head=True)
    assert drafts_of(folder, target) == drafts_of(write_heads(plain, each, "medusa_lm_head.pt"), target)


def test_an_lm_head_of_the_commonest_tokens_is_mapped(
    tmp_path: Path, target: Decoder, hf_target: transformers.LlamaForCausalLM
) -> None:
    """What such a head may say, the whole one says with the other tokens' logits out of reach."""
    tensors, common = head_tensors(True), torch.tensor([50, 7, 31, 12, 60, 3])
    small = {name: tensor[common] if "lm_heads" in name else tensor for name, tensor in in_vllms_names(tensors).items()}
    folder = write_heads(tmp_path, small | {"token_map": common}, truncated_vocab_size=len(common))
    rank = Rank(target, load_medusa(folder, target, PLACEMENT, num_drafts=NUM_HEADS))
    rank.add(0, prompt(9, seed=2))
    rank.step([], {0: 9}, NUM_HEADS)
    for _ in range(4):
        hidden = hidden_states(hf_target, rank.tokens(0))[-1][-2]
        picks = plain_drafts({**tensors, **lm_heads_of(tensors, common)}, hidden, hf_target.lm_head.weight.detach())
        assert rank.drafts[0] == [int(common[pick]) for pick in picks]
        rank.step([0], {}, NUM_HEADS)


def lm_heads_of(tensors: dict[str, Tensor], token_ids: Tensor) -> dict[str, Tensor]:
    names = [f"{head}.{NUM_LAYERS}.weight" for head in range(NUM_HEADS)]
    return {name: tensors[name][token_ids] for name in names}


def test_a_token_map_out_of_the_vocabulary_is_refused(tmp_path: Path, target: Decoder) -> None:
    tensors = in_vllms_names(head_tensors(False)) | {"token_map": torch.tensor([0, SHAPE["vocab_size"]])}
    with pytest.raises(ConfigurationError, match="token_map names tokens outside the target's vocabulary of 61"):
        load_medusa(write_heads(tmp_path, tensors), target, PLACEMENT, num_drafts=1)


def test_more_drafts_than_heads_are_refused(tmp_path: Path, target: Decoder) -> None:
    folder = write_heads(tmp_path, head_tensors(True))
    with pytest.raises(ConfigurationError, match="holds 3 Medusa heads, but num_speculative_tokens is 4"):
        load_medusa(folder, target, PLACEMENT, num_drafts=4)


def test_heads_of_another_hidden_size_are_refused(tmp_path: Path, target: Decoder) -> None:
    tensors = {f"0.0.linear.{kind}": torch.zeros(shape) for kind, shape in (("weight", (48, 48)), ("bias", (48,)))}
    folder = write_heads(tmp_path, tensors)
    with pytest.raises(ConfigurationError, match="size 48, the target's have size 32"):
        load_medusa(folder, target, PLACEMENT, num_drafts=1)


def test_a_tensor_that_no_head_uses_is_refused(tmp_path: Path, target: Decoder) -> None:
    folder = write_heads(tmp_path, head_tensors(True) | {"4.0.linear.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors 4\.0\.linear\.weight"):
        load_medusa(folder, target, PLACEMENT, num_drafts=1)


def test_a_folder_without_heads_says_what_it_lacks(tmp_path: Path, target: Decoder) -> None:
    folder = write_heads(tmp_path, {"fc.weight": torch.zeros(1)})
    with pytest.raises(
        CheckpointError, match=r"expected a tensor 0\.0\.linear\.weight or blocks\.0\.layers\.0\.weight"
    ):
        load_medusa(folder, target, PLACEMENT, num_drafts=1)
