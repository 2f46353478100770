"""The layouts that EAGLE heads are published in: each drafts as the same weights in the layout of test_eagle.py.

SafeAILab/EAGLE loads `pytorch_model.bin` (eagle/model/ea_model.py); its EAGLE-1 heads for Qwen2 have biases by
`qkv_bias` (cnets1.py), its EAGLE-3 head for Llama 3.3 70B a hidden size of its own and `target_hidden_size` (cnets.py).
vLLM and Speculators know `layers.0` for `midlayer` and `norm_before_residual` (vllm/model_executor/models/
llama_eagle3.py, src/speculators/models/eagle3/).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.runtime.speculative.conftest import MAX_MODEL_LEN, PLACEMENT, SHAPE, Rank, hidden_states, prompt
from tests.runtime.speculative.test_eagle import (
    CAPTURED,
    DRAFT_VOCAB,
    EPS,
    HEAD_DIM,
    SIZE,
    VOCAB,
    Method,
    head_tensors,
    load,
    norm,
    write_head,
)
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.errors import CheckpointError, ConfigurationError
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.speculative.eagle_heads import load_eagle1, load_eagle3

Tensors = dict[str, Tensor]
WIDE = 48
"""Another hidden size than the target's."""


def drafts_of(folder: Path, method: Method, target: Decoder) -> list[list[int]]:
    """Of a few steps."""
    rank = Rank(target, load(folder, method, target))
    rank.add(0, prompt(9, seed=0))
    rank.step([], {0: 9}, num_proposals=3)
    drafts = []
    for _ in range(6):
        assert rank.drafts[0]
        drafts.append(rank.drafts[0])
        rank.step([0], {}, num_proposals=3)
    return drafts


def expected_drafts(folder: Path, method: Method, tensors: Tensors, target: Decoder) -> list[list[int]]:
    """Of the layout that all others stand against."""
    (plain := folder / "plain").mkdir()
    return drafts_of(write_head(plain, method, tensors), method, target)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_authors_pickle_drafts_as_safetensors_do(tmp_path: Path, method: Method, target: Decoder) -> None:
    tensors = head_tensors(method)
    folder = write_head(tmp_path, method, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "pytorch_model.bin")
    assert drafts_of(folder, method, target) == expected_drafts(tmp_path, method, tensors, target)


def test_an_eagle3_head_may_claim_the_layers_of_its_target(tmp_path: Path, target: Decoder) -> None:
    """config.json of yuhuili/EAGLE3-Vicuna1.3-13B says 40."""
    tensors = head_tensors("eagle3")
    folder = write_head(tmp_path, "eagle3", tensors, num_hidden_layers=40)
    assert drafts_of(folder, "eagle3", target) == expected_drafts(tmp_path, "eagle3", tensors, target)


def test_biases_of_a_head_for_qwen2_are_taken_without_a_word_of_them_in_its_config(
    tmp_path: Path, target: Decoder
) -> None:
    """A number of the layer's input that is always one makes a column of the weights a bias."""
    without = head_tensors("eagle")
    without["fc.weight"][0] = 0
    without["fc.bias"] = torch.eye(SIZE)[0]
    biased = dict(without)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = without[f"layers.0.self_attn.{name}.weight"].clone()
        biased[f"layers.0.self_attn.{name}.bias"] = weight[:, 0].clone()
        weight[:, 0] = 0
        biased[f"layers.0.self_attn.{name}.weight"] = weight
    folder = write_head(tmp_path, "eagle", biased, architectures=["Qwen2ForCausalLM"])
    assert drafts_of(folder, "eagle", target) == expected_drafts(tmp_path, "eagle", without, target)


@pytest.mark.parametrize("declared", [{}, {"target_hidden_size": SIZE}])
def test_an_eagle3_head_may_have_a_hidden_size_of_its_own(
    tmp_path: Path, target: Decoder, hf_target: transformers.LlamaForCausalLM, declared: dict[str, int]
) -> None:
    """The same head with zeros behind its own numbers, and norms that make up for them."""
    tensors = head_tensors("eagle3")
    wide = widened(tensors) | {"embed_tokens.weight": pad_columns(hf_target.model.embed_tokens.weight.detach())}
    options = {"hidden_size": WIDE, "head_dim": HEAD_DIM, "rms_norm_eps": EPS * SIZE / WIDE}
    folder = write_head(tmp_path, "eagle3", wide, **options, **declared)
    assert drafts_of(folder, "eagle3", target) == expected_drafts(tmp_path, "eagle3", tensors, target)


def widened(tensors: Tensors) -> Tensors:
    wide = {}
    for name, tensor in tensors.items():
        if "norm" in name:
            wide[name] = pad_columns(tensor[None])[0] * (SIZE / WIDE) ** 0.5
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            wide[name] = torch.cat([pad_columns(half) for half in tensor.split(SIZE, 1)], 1)
        elif any(part in name for part in ("gate_proj", "up_proj", "lm_head")):
            wide[name] = pad_columns(tensor)
        elif any(part in name for part in ("fc", "o_proj", "down_proj")):
            wide[name] = pad_columns(tensor.T).T.contiguous()
        else:
            wide[name] = tensor
    return wide


def pad_columns(tensor: Tensor) -> Tensor:
    return functional.pad(tensor, (0, WIDE - SIZE))


def test_a_head_in_speculators_layout_drafts_as_the_authors_does(tmp_path: Path, target: Decoder) -> None:
    tensors = head_tensors("eagle3")
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    layer = SHAPE | {"num_hidden_layers": 1, "rms_norm_eps": EPS, "model_type": "llama"}
    config: dict[str, Any] = dict.fromkeys(SHAPE) | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": CAPTURED,
        "eagle_config": None,
        "norm_before_residual": False,
        "target_hidden_size": None,
    }
    folder = write_head(tmp_path, "eagle3", renamed, **config)
    assert drafts_of(folder, "eagle3", target) == expected_drafts(tmp_path, "eagle3", tensors, target)


@pytest.mark.parametrize("is_normed", [True, False])
def test_the_residual_stream_begins_where_norm_before_residual_says(
    tmp_path: Path, target: Decoder, hf_target: transformers.LlamaForCausalLM, is_normed: bool
) -> None:
    """After one token: attention then is that entry's value."""
    tensors = head_tensors("eagle3")
    rank = Rank(target, load(write_head(tmp_path, "eagle3", tensors, norm_before_residual=is_normed), "eagle3", target))
    drafts, expected, others = [], [], []
    for token in range(1, 20):
        rank.add(0, [token])
        rank.step([], {0: 1}, num_proposals=1)
        drafts += rank.drafts[0]
        expected.append(first_draft(tensors, hf_target, rank.tokens(0), is_normed))
        others.append(first_draft(tensors, hf_target, rank.tokens(0), not is_normed))
    assert drafts == expected
    assert drafts != others


@torch.inference_mode()
def first_draft(t: Tensors, model: transformers.LlamaForCausalLM, token_ids: list[int], is_normed: bool) -> int:
    streams = hidden_states(model, token_ids[:1])
    state = torch.cat([streams[layer][0] for layer in CAPTURED]) @ t["fc.weight"].T
    normed = norm(state, t["midlayer.hidden_norm.weight"])
    embedded = norm(model.model.embed_tokens.weight[token_ids[1]], t["midlayer.input_layernorm.weight"])
    value = torch.cat([embedded, normed]) @ t["midlayer.self_attn.v_proj.weight"].T
    attended = value.unflatten(0, (-1, HEAD_DIM)).repeat_interleave(2, 0).flatten()
    hidden = (normed if is_normed else state) + attended @ t["midlayer.self_attn.o_proj.weight"].T
    x = norm(hidden, t["midlayer.post_attention_layernorm.weight"])
    gate, up = x @ t["midlayer.mlp.gate_proj.weight"].T, x @ t["midlayer.mlp.up_proj.weight"].T
    hidden = hidden + (functional.silu(gate) * up) @ t["midlayer.mlp.down_proj.weight"].T
    draft = int((norm(hidden, t["norm.weight"]) @ t["lm_head.weight"].T).argmax())
    return draft + int(t["d2t"][draft])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 64}, "hidden states of size 64, the target's have size 32"),
        ({"hidden_size": WIDE, "head_dim": HEAD_DIM}, r"no tensor embed_tokens\.weight.* 48 is not the target's 32"),
        ({"norm_before_fc": True}, "trained with norm_before_fc, which is not supported"),
        ({"fc_norm": True}, "trained with fc_norm, which is not supported"),
        ({"eagle_config": {"norm_output": True}}, "trained with norm_output, which is not supported"),
    ],
)
def test_what_would_draft_wrongly_is_refused(
    tmp_path: Path, target: Decoder, changes: dict[str, Any], message: str
) -> None:
    tensors = head_tensors("eagle3")
    folder = write_head(tmp_path, "eagle3", widened(tensors) if "hidden_size" in changes else tensors, **changes)
    with pytest.raises(ConfigurationError, match=message):
        load_eagle3(folder, target, PLACEMENT, MAX_MODEL_LEN)


def test_biases_of_some_projections_only_are_refused(tmp_path: Path, target: Decoder) -> None:
    tensors = head_tensors("eagle") | {"layers.0.self_attn.k_proj.bias": torch.zeros(SIZE // 2)}
    with pytest.raises(CheckpointError, match=r"q_proj\.bias' is missing"):
        load_eagle1(write_head(tmp_path, "eagle", tensors), target, PLACEMENT, MAX_MODEL_LEN)


def test_a_vocabulary_in_config_is_the_targets(tmp_path: Path, target: Decoder) -> None:
    """Nested, as Speculators writes it."""
    layer = SHAPE | {"num_hidden_layers": 1, "vocab_size": VOCAB + 1}
    folder = write_head(tmp_path, "eagle3", head_tensors("eagle3"), transformer_layer_config=layer)
    with pytest.raises(ConfigurationError, match="vocab_size is 62, the target's is 61"):
        load_eagle3(folder, target, PLACEMENT, MAX_MODEL_LEN)
