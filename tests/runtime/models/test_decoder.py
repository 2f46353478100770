"""Every family's logits and residual streams equal Hugging Face's, computed at once or in chunks over the KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, GroupInputs, LayerCache, StepInputs
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.kernels.ops import reference_ops
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.decoder import Decoder, DecoderOutput
from kvasir_runtime.models.dense_layer import GroupedQueryAttention
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.loader import load_decoder
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.parallel.stage import Stage

NUM_TOKENS = 40
BLOCK_SIZE = 8
WINDOW = 12
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 1,
    "head_dim": 16,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 16}),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 16}),
    "Gemma2ForCausalLM": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 10.0}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GEMMA),
    "Phi3ForCausalLM": ("Phi3Config", {"partial_rotary_factor": 0.5, "hidden_size": 64, "sliding_window": WINDOW}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "MixtralForCausalLM": ("MixtralConfig", EXPERTS | {"sliding_window": WINDOW}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        EXPERTS | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
}


@dataclass(frozen=True)
class Pair:
    """One model, theirs and ours."""

    theirs: Any
    ours: Decoder
    stages: list[Decoder]
    """Ours, cut in two."""


def make_pair(architecture: str, folder: Path) -> Pair:
    config_class, changes = FAMILIES[architecture]
    torch.manual_seed(7)
    theirs = getattr(transformers, architecture)(getattr(transformers, config_class)(**(SHAPE | changes))).eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:  # norms and biases start as constants
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(folder)
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32, ops=reference_ops())
    with Checkpoint(folder) as checkpoint:
        options = read_options(read_config(folder))
        stages = [load_decoder(checkpoint, options, placement, NUM_TOKENS, Stage(index, 2)) for index in range(2)]
        return Pair(theirs, load_decoder(checkpoint, options, placement, NUM_TOKENS), stages)


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """Indirect parameter: the architecture."""
    return make_pair(request.param, tmp_path)


def empty_caches(decoder: Decoder) -> list[LayerCache]:
    shapes = [
        (NUM_TOKENS // BLOCK_SIZE, BLOCK_SIZE, spec.num_kv_heads, spec.key_dim)
        for spec in decoder.kv_specs(torch.float32)
    ]
    return [LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan), 0) for shape in shapes]


def step_of(start: int, length: int) -> AttentionStep:
    """Tokens `start` to `start + length` of one request whose blocks lie in reverse order."""
    positions = torch.arange(start, start + length)
    block_table = torch.arange(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32).flip(0)[None]
    slots = block_table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    inputs = StepInputs(
        token_ids=tokens()[positions],
        positions=positions,
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([start + length], dtype=torch.int32),
        rows=torch.zeros(1, dtype=torch.int32),
        groups=(GroupInputs(block_table, slots),),
        lengths=StepLengths(np.array([length], np.int32), int(length == 1), start + length),
    )
    return ReferenceAttention().prepare(inputs)


def run(
    decoder: Decoder, step: AttentionStep, caches: list[LayerCache], kept: list[int] | None, captured: tuple[int, ...]
) -> DecoderOutput:
    kept_tokens = None if kept is None else torch.tensor(kept)
    return decoder(step.inputs.token_ids, step, caches, kept_tokens, captured)


def tokens() -> Tensor:
    return torch.randint(96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


every_family = pytest.mark.parametrize("pair", FAMILIES, indirect=True)


@every_family
@torch.inference_mode()
def test_logits_equal_hugging_faces_in_chunks_of_any_length(pair: Pair) -> None:
    wanted = pair.theirs(tokens()[None]).logits[0]
    for lengths in ([NUM_TOKENS], [7, 1, 1, 18, 13]):
        caches, seen, start = empty_caches(pair.ours), [], 0
        for length in lengths:
            seen.append(pair.ours.logits(run(pair.ours, step_of(start, length), caches, None, ()).hidden))
            start += length
        torch.testing.assert_close(torch.cat(seen), wanted, atol=2e-4, rtol=1e-4)


@every_family
@torch.inference_mode()
def test_captured_streams_are_what_enters_the_layers_of_hugging_face(pair: Pair) -> None:
    wanted = pair.theirs(tokens()[None], output_hidden_states=True).hidden_states
    output = run(pair.ours, step_of(0, NUM_TOKENS), empty_caches(pair.ours), [4], (2, 0, 1))
    for seen, layer in zip(output.captured, (2, 0, 1), strict=True):
        torch.testing.assert_close(seen, wanted[layer][0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("pair", ["LlamaForCausalLM"], indirect=True)
@torch.inference_mode()
def test_only_the_kept_tokens_come_back_in_their_order(pair: Pair) -> None:
    step = step_of(0, NUM_TOKENS)
    every = run(pair.ours, step, empty_caches(pair.ours), None, ())
    kept = run(pair.ours, step, empty_caches(pair.ours), [NUM_TOKENS - 1, 5], ())
    assert kept.captured == ()
    torch.testing.assert_close(kept.hidden, every.hidden[[NUM_TOKENS - 1, 5]])


@every_family
@pytest.mark.parametrize("kept", [None, [2, 20]])
@torch.inference_mode()
def test_stages_come_to_the_same_numbers_as_the_whole(kept: list[int] | None, pair: Pair) -> None:
    step, captured = step_of(0, 21), (0, 1, 2)
    whole = run(pair.ours, step, empty_caches(pair.ours), kept, captured)
    first, last = pair.stages
    left = first.states(step.inputs.token_ids, step, empty_caches(first), None, captured)
    kept_tokens = None if kept is None else torch.tensor(kept)
    output = last(step.inputs.token_ids, step, empty_caches(last), kept_tokens, captured, entering=left)
    assert torch.equal(last.logits(output.hidden), pair.ours.logits(whole.hidden))
    assert all(torch.equal(a, b) for a, b in zip(output.captured, whole.captured, strict=True))


@dataclass(frozen=True)
class SharedKv:
    """Keeps nothing of its own: attends to the first layer's keys and values with queries of its own."""

    attention: GroupedQueryAttention

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        return self.attention.output

    def kv_specs(self, dtype: torch.dtype) -> tuple[KvSpec, ...]:
        return ()

    def __call__(self, hidden: Tensor, step: AttentionStep, caches: Sequence[LayerCache]) -> Tensor:
        options = self.attention.options
        query = self.attention.qkv(hidden)[:, : options.query_size].view(len(hidden), options.num_heads, -1)
        return step.attend(query, caches[0], scale=options.scale, window=None, softcap=None).flatten(1)


@pytest.mark.parametrize("pair", ["LlamaForCausalLM"], indirect=True)
@torch.inference_mode()
def test_a_layer_that_declares_no_kv_reads_another_layers(pair: Pair) -> None:
    first, second, third = pair.ours.layers[:3]
    shared = replace(second, attention=SharedKv(cast(GroupedQueryAttention, second.attention)))
    last = replace(third, attention=replace(cast(GroupedQueryAttention, third.attention), cache_index=1))
    decoder = replace(pair.ours, layers=(first, shared, last))
    seen = []
    for lengths in ([NUM_TOKENS], [NUM_TOKENS - 1, 1]):
        caches, start = empty_caches(decoder), 0
        assert len(caches) == 2
        for length in lengths:
            hidden = run(decoder, step_of(start, length), caches, None, ()).hidden
            start += length
        seen.append(hidden[-1])
    torch.testing.assert_close(seen[0], seen[1])
    assert not seen[0].isnan().any()


@torch.inference_mode()
def test_values_may_be_of_another_size_than_keys() -> None:
    cache = LayerCache(torch.randn(10, BLOCK_SIZE, 2, 8), torch.randn(10, BLOCK_SIZE, 2, 6), 0)
    step = step_of(NUM_TOKENS - 3, 3)
    query = torch.randn(3, 4, 8)
    padded = LayerCache(cache.key, torch.nn.functional.pad(cache.value, (0, 2)), 0)
    out, wide = (step.attend(query, each, scale=0.3, window=None, softcap=None) for each in (cache, padded))
    torch.testing.assert_close(out, wide[..., :6])
