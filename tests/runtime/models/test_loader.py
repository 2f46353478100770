from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir_runtime.errors import CheckpointError, ModelLoadError, UnknownArchitectureError
from kvasir_runtime.kernels.ops import reference_ops
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.dense_layer import GroupedQueryAttention
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.parallel.stage import WHOLE, Stage

Write = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32, stage: Stage = WHOLE, **options_of_load: Any) -> Decoder:
    options = read_options(read_config(folder))
    placement = Placement(
        device=torch.device("cpu"),
        dtype=dtype,
        ops=reference_ops(),
    )
    with Checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint, options, placement, 16, stage, **options_of_load)


def test_joins_query_key_and_value_into_one_layer(tensors: Tensors, write_checkpoint: Write) -> None:
    attention = load(write_checkpoint(tensors)).layers[1].attention
    assert isinstance(attention, GroupedQueryAttention)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention.qkv(hidden), hidden @ torch.cat(parts).T)


def test_sharded_checkpoints_load_like_single_ones(tensors: Tensors, write_checkpoint: Write) -> None:
    decoder = load(write_checkpoint(tensors, shards=3))
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(decoder.head(hidden), hidden @ tensors["lm_head.weight"].T)


def test_weights_are_cast_and_outlive_the_files(tensors: Tensors, write_checkpoint: Write) -> None:
    folder = write_checkpoint({name: tensor.half() for name, tensor in tensors.items()})
    decoder = load(folder, torch.bfloat16)
    (folder / "model.safetensors").unlink()
    assert decoder.embedding(torch.tensor([3])).dtype is torch.bfloat16
    assert decoder.norm.weight.dtype is torch.bfloat16


def test_tied_embeddings_share_one_weight(tensors: Tensors, write_checkpoint: Write) -> None:
    del tensors["lm_head.weight"]
    decoder = load(write_checkpoint(tensors, tie_word_embeddings=True))
    assert decoder.embedding.table is decoder.head
    torch.testing.assert_close(decoder.embedding(torch.tensor([5])), tensors["model.embed_tokens.weight"][[5]])


def load_gemma(tensors: Tensors, write_checkpoint: Write) -> Decoder:
    """In bfloat16, from Llama's tensors with the norms that Gemma 2 has besides."""
    del tensors["lm_head.weight"]
    for layer in range(2):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.zeros(32)
    return load(write_checkpoint(tensors, architectures=["Gemma2ForCausalLM"], head_dim=8), torch.bfloat16)


def test_norms_of_one_plus_w_keep_what_bfloat16_would_round_away(tensors: Tensors, write_checkpoint: Write) -> None:
    tensors["model.norm.weight"] = torch.full((32,), 0.001)
    torch.testing.assert_close(load_gemma(tensors, write_checkpoint).norm.weight, torch.full((32,), 1.001))


def test_the_embeddings_scale_is_rounded_as_in_training(tensors: Tensors, write_checkpoint: Write) -> None:
    assert load_gemma(tensors, write_checkpoint).embedding.scale == torch.tensor(32**0.5).bfloat16().item() != 32**0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"'model.layers.1.mlp.up_proj.weight' is missing.*48, 32",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"'model.norm.weight' has shape \[31\], expected \[32\]",
        ),
        (lambda t: t.update({"model.layers.2.extra": torch.ones(1)}), r"unexpected tensors model.layers.2.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"'model.norm.weight' has type torch.int8",
        ),
    ],
)
def test_a_checkpoint_that_breaks_its_promise_is_refused_by_tensor(
    change: Callable[[Tensors], Any], message: str, tensors: Tensors, write_checkpoint: Write
) -> None:
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(write_checkpoint(tensors))


def test_a_damaged_file_is_named(tensors: Tensors, write_checkpoint: Write) -> None:
    folder = write_checkpoint(tensors)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)


def test_a_missing_shard_is_named(tensors: Tensors, write_checkpoint: Write) -> None:
    folder = write_checkpoint(tensors, shards=2)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-1\.safetensors, which is not there"):
        load(folder)


def test_a_folder_without_weights_or_config_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"), Checkpoint(tmp_path):
        pass


def test_unknown_architectures_are_refused_with_the_known_ones(tensors: Tensors, write_checkpoint: Write) -> None:
    folder = write_checkpoint(tensors, architectures=["BertModel"])
    with pytest.raises(UnknownArchitectureError, match=r"BertModel is not known.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "proportional"}}, r"rope type 'proportional' is not supported"),
        ({"hidden_act": "relu"}, r"hidden_act 'relu' is not supported"),
        ({"hidden_size": "32"}, r"'hidden_size' is '32', expected a whole number"),
        ({"vocab_size": None}, r"'vocab_size' is missing"),
        ({"quantization_config": {"bits": 4}}, r"quantized checkpoints are not supported"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused(
    changes: dict[str, Any], message: str, tensors: Tensors, write_checkpoint: Write
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(write_checkpoint(tensors, **changes))


FIRST, LAST = Stage(0, 2), Stage(1, 2)


def test_a_stage_reads_its_own_tensors_only(tensors: Tensors, write_checkpoint: Write) -> None:
    """Those of the other are damaged."""
    sound = dict(tensors)
    ends = {FIRST: ("model.layers.1.", "model.norm.", "lm_head."), LAST: ("model.layers.0.", "model.embed_tokens.")}
    for stage, beginnings in ends.items():
        broken = {name: torch.ones(1) if name.startswith(beginnings) else sound[name] for name in sound}
        decoder = load(write_checkpoint(broken), stage=stage)
        assert (decoder.first_layer, len(decoder.layers)) == (stage.index, 1)
        assert [part is None for part in (decoder.embedding, decoder.norm, decoder.head)] == (
            [False, True, True] if stage.is_first else [True, False, False]
        )


def test_both_ends_have_the_table_of_tied_embeddings(tensors: Tensors, write_checkpoint: Write) -> None:
    del tensors["lm_head.weight"]
    folder, token = write_checkpoint(tensors, tie_word_embeddings=True), torch.tensor([5])
    first, last = (load(folder, stage=stage) for stage in (FIRST, LAST))
    row = tensors["model.embed_tokens.weight"][[5]]
    torch.testing.assert_close(first.embedding(token), row)
    torch.testing.assert_close(last.embedding(token), row)
    assert first.head is None
    assert last.head is last.embedding.table


def test_the_last_stage_has_the_embedding_where_drafts_need_it(tensors: Tensors, write_checkpoint: Write) -> None:
    decoder = load(write_checkpoint(tensors), stage=LAST, drafts_embed=True)
    torch.testing.assert_close(decoder.embedding(torch.tensor([3])), tensors["model.embed_tokens.weight"][[3]])


@pytest.mark.parametrize("stage", [FIRST, LAST])
@pytest.mark.parametrize("name", ["model.layers.2.extra", "model.extra.weight", "lm_heads.weight"])
def test_a_stage_refuses_tensors_of_nobody(name: str, stage: Stage, tensors: Tensors, write_checkpoint: Write) -> None:
    tensors[name] = torch.ones(1)
    with pytest.raises(CheckpointError, match=f"unexpected tensors {name}"):
        load(write_checkpoint(tensors), stage=stage)


def test_a_stage_refuses_unknown_tensors_of_its_own_layers(tensors: Tensors, write_checkpoint: Write) -> None:
    tensors["model.layers.1.extra.weight"] = torch.ones(1)
    folder = write_checkpoint(tensors)
    assert load(folder, stage=FIRST).first_layer == 0
    with pytest.raises(CheckpointError, match=r"unexpected tensors model\.layers\.1\.extra\.weight"):
        load(folder, stage=LAST)
