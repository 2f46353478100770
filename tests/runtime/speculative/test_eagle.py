"""EAGLE heads against plain torch over the whole sequence: which token goes with which hidden state, and that the KV of
earlier steps is complete, whatever was accepted."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.runtime.speculative.conftest import (
    BLOCK_SIZE,
    CPU_PLACEMENT,
    MAX_MODEL_LEN,
    PLACEMENT,
    SHAPE,
    Gathered,
    NotingAttention,
    Rank,
    hidden_states,
    prompt,
)
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvasir_runtime.attention.backend import AttentionBackend
from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.errors import CheckpointError, ConfigurationError
from kvasir_runtime.execution.graphs import STEPS_BEFORE_CAPTURE, GraphShape
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.speculative.eagle import EagleProposer
from kvasir_runtime.speculative.eagle_heads import load_eagle1, load_eagle3

Method = Literal["eagle", "eagle3"]
SIZE, VOCAB, HEAD_DIM, MLP = SHAPE["hidden_size"], SHAPE["vocab_size"], 8, SHAPE["intermediate_size"]
EPS = 1e-6
CAPTURED = (0, 1, 2)
DRAFT_VOCAB = 24


def head_tensors(method: Method) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    prefix, wide = ("layers.0", SIZE) if method == "eagle" else ("midlayer", 2 * SIZE)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, (2 if method == "eagle" else 3) * SIZE),
        f"{prefix}.self_attn.q_proj.weight": (SIZE, wide),
        f"{prefix}.self_attn.k_proj.weight": (SIZE // 2, wide),
        f"{prefix}.self_attn.v_proj.weight": (SIZE // 2, wide),
        f"{prefix}.self_attn.o_proj.weight": (SIZE, SIZE),
        f"{prefix}.mlp.gate_proj.weight": (MLP, SIZE),
        f"{prefix}.mlp.up_proj.weight": (MLP, SIZE),
        f"{prefix}.mlp.down_proj.weight": (SIZE, MLP),
        f"{prefix}.post_attention_layernorm.weight": (SIZE,),
    }
    if method == "eagle3":
        shapes |= {f"{prefix}.hidden_norm.weight": (SIZE,), f"{prefix}.input_layernorm.weight": (SIZE,)}
        shapes |= {"norm.weight": (SIZE,), "lm_head.weight": (DRAFT_VOCAB, SIZE)}
    tensors = {name: torch.randn(shape, generator=random) * 0.4 for name, shape in shapes.items()}
    if method == "eagle3":
        chosen = torch.arange(DRAFT_VOCAB) * 2 + 3
        tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def write_head(folder: Path, method: Method, tensors: dict[str, Tensor], **changes: Any) -> Path:
    config: dict[str, Any] = SHAPE | {"architectures": ["Any"], "num_hidden_layers": 1, "rms_norm_eps": EPS}
    if method == "eagle3":
        config |= {"draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURED}}
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(
    folder: Path,
    method: Method,
    target: Decoder,
    max_model_len: int = MAX_MODEL_LEN,
    *,
    is_compiled: bool = False,
    backend: AttentionBackend | None = None,
    **options: int,
) -> EagleProposer:
    load_head = load_eagle1 if method == "eagle" else load_eagle3
    placement = CPU_PLACEMENT if is_compiled else PLACEMENT
    backend = backend or (CpuAttention() if is_compiled else ReferenceAttention())
    return EagleProposer(method, load_head(folder, target, placement, max_model_len), backend, **options)


@dataclass(frozen=True)
class PlainEagle:
    """The head over whole sequences, without pages or steps."""

    method: Method
    tensors: dict[str, Tensor]
    model: transformers.LlamaForCausalLM

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], num_drafts: int, begin: int = 0, num_zeros: int = 0) -> list[int]:
        """The layer attends to nothing before `begin`, and to zeros in the first entries from there on."""
        states = self._target_states(token_ids[:-1])
        tokens = list(token_ids)
        for _ in range(num_drafts):
            state = self._layer(states, torch.tensor(tokens[1:]), begin, num_zeros)[-1]
            tokens.append(self._most_likely(state))
            states = torch.cat([states, state[None]])
        return tokens[len(token_ids) :]

    def _target_states(self, token_ids: list[int]) -> Tensor:
        states = hidden_states(self.model, token_ids)
        if self.method == "eagle":
            return states[-1]
        return torch.cat([states[layer] for layer in CAPTURED], -1) @ self.tensors["fc.weight"].T

    def _layer(self, states: Tensor, token_ids: Tensor, begin: int, num_zeros: int) -> Tensor:
        t, embedded = self.tensors, self.model.model.embed_tokens.weight[token_ids]
        if self.method == "eagle":
            prefix, residual = "layers.0", torch.cat([embedded, states], -1) @ t["fc.weight"].T
            entered = residual
        else:
            prefix, residual = "midlayer", states
            normed = norm(embedded, t[f"{prefix}.input_layernorm.weight"])
            entered = torch.cat([normed, norm(states, t[f"{prefix}.hidden_norm.weight"])], -1)
        query, key, value = (
            (entered @ t[f"{prefix}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(self.model.config)(entered, torch.arange(len(entered))[None])
        query, key = apply_rotary_pos_emb(query[None], key[None], cos, sin)
        place, value = torch.arange(len(entered)), value[None]
        is_zero = ((place >= begin) & (place < begin + num_zeros))[:, None]
        key, value = key.masked_fill(is_zero, 0), value.masked_fill(is_zero, 0)
        is_seen = (place <= place[:, None]) & ((place >= begin) | (place[:, None] < begin))
        attended = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=is_seen
        )
        hidden = residual + attended[0].transpose(0, 1).flatten(1) @ t[f"{prefix}.self_attn.o_proj.weight"].T
        x = norm(hidden, t[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = x @ t[f"{prefix}.mlp.gate_proj.weight"].T, x @ t[f"{prefix}.mlp.up_proj.weight"].T
        return hidden + (functional.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T

    def _most_likely(self, state: Tensor) -> int:
        if self.method == "eagle":
            return int((self.model.lm_head.weight @ state).argmax())
        draft = int((self.tensors["lm_head.weight"] @ norm(state, self.tensors["norm.weight"])).argmax())
        return draft + int(self.tensors["d2t"][draft])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


@pytest.fixture(params=["eagle", "eagle3"])
def method(request: pytest.FixtureRequest) -> Method:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def rank(tmp_path: Path, method: Method, target: Decoder) -> Rank:
    return Rank(target, load(write_head(tmp_path, method, head_tensors(method)), method, target))


@pytest.fixture
def plain(method: Method, hf_target: transformers.LlamaForCausalLM) -> PlainEagle:
    return PlainEagle(method, head_tensors(method), hf_target)


def assert_drafts(rank: Rank, row: int, plain: PlainEagle, most: int) -> None:
    """As many as there were blocks for: a draft's entry stands one position before the draft model's would."""
    slots = -(-rank.step_end(row) // BLOCK_SIZE) * BLOCK_SIZE
    assert len(rank.drafts[row]) == max(0, min(most, slots - (rank.known[row] - 2)))
    assert rank.drafts[row] == plain.drafts(rank.tokens(row), len(rank.drafts[row]))


def test_drafts_are_those_of_the_plain_head(rank: Rank, plain: PlainEagle) -> None:
    rank.add(0, prompt(9, seed=0))
    rank.step([], {0: 9}, num_proposals=3)
    for _ in range(10):
        assert_drafts(rank, 0, plain, most=3)
        rank.step([0], {}, num_proposals=3)


def test_drafts_stay_within_a_context_that_ends_in_the_middle_of_a_block(
    tmp_path: Path, method: Method, target: Decoder, plain: PlainEagle
) -> None:
    """The rope tables end with the context, the blocks behind it."""
    head = load(write_head(tmp_path, method, head_tensors(method)), method, target, max_model_len=11)
    rank = Rank(target, head, max_model_len=11)
    rank.add(0, prompt(9, seed=3))
    rank.step([], {0: 9}, num_proposals=6)
    assert rank.drafts[0][:2] == plain.drafts(rank.tokens(0), 2)


def test_drafts_that_held_leave_the_right_kv(rank: Rank, plain: PlainEagle) -> None:
    """The target's own continuation stands in for drafts, of which some hold."""
    rank.add(0, prompt(6, seed=1))
    rank.step([], {0: 6}, num_proposals=3)
    held = []
    for num_right in (2, 0, 1, 3):
        right = PlainTarget(plain.model).continuation(rank.tokens(0), 3)
        rank.drafts[0] = right[:num_right] + [(token + 1) % VOCAB for token in right[num_right:]]
        held += rank.step([0], {}, num_proposals=3)
        assert_drafts(rank, 0, plain, most=3)
    assert held == [2, 0, 1, 3]


def test_prompts_in_chunks_are_followed(rank: Rank, plain: PlainEagle) -> None:
    rank.add(1, prompt(7, seed=2))
    rank.step([], {1: 7}, num_proposals=2)
    rank.add(2, prompt(13, seed=3))
    for length in (5, 6, 2):
        rank.step([1], {2: length}, num_proposals=2)
    assert_drafts(rank, 1, plain, most=2)
    assert_drafts(rank, 2, plain, most=2)


def test_a_forked_row_goes_on_from_its_source(rank: Rank, plain: PlainEagle) -> None:
    rank.add(0, prompt(11, seed=8))
    rank.step([], {0: 11}, num_proposals=2)
    rank.fork(0, 1)
    copied = rank.caches[-1].key[int(rank.tables[0][1, 2]), 0].clone()
    rank.step([0, 1], {}, num_proposals=2)
    assert torch.equal(rank.caches[-1].key[int(rank.tables[0][1, 2]), 0], copied), "the copied block is its own"
    for _ in range(3):
        rank.step([0, 1], {}, num_proposals=2)
        assert_drafts(rank, 1, plain, most=2)


@pytest.mark.parametrize("num_missed", [5, 6, 7, 8, 12])
def test_after_steps_that_it_was_not_shown_a_head_attends_from_where_it_sees_the_sequence_again(
    rank: Rank, plain: PlainEagle, num_missed: int
) -> None:
    """Where it comes back in the middle of a block, the block's missing entries are attended to as zeros."""
    rank.add(0, prompt(6, seed=4))
    rank.step([], {0: 6}, num_proposals=3)
    for _ in range(num_missed):
        rank.step([0], {}, num_proposals=0)
        assert rank.drafts[0] == []
    first = rank.known[0] - 1  # the next entry
    for _ in range(6):
        rank.step([0], {}, num_proposals=3)
        begin = first // BLOCK_SIZE * BLOCK_SIZE
        drafts = plain.drafts(rank.tokens(0), len(rank.drafts[0]), begin=begin, num_zeros=first - begin)
        assert rank.drafts[0] == drafts


def test_a_pass_recorded_while_all_was_shown_is_not_replayed_for_what_was_missed(
    tmp_path: Path, method: Method, target: Decoder, plain: PlainEagle
) -> None:
    """What a recording decides in Python it decides once."""
    head = load(write_head(tmp_path, method, head_tensors(method)), method, target, is_compiled=True)
    rank = Rank(target, head, records=True)
    rank.add(0, prompt(6, seed=4))
    rank.step([], {0: 6}, num_proposals=3)
    for _ in range(2 * STEPS_BEFORE_CAPTURE):
        rank.step([0], {}, num_proposals=3)
        assert_drafts(rank, 0, plain, most=3)
    assert GraphShape(1, 1) in rank.recorded
    for _ in range(2 * BLOCK_SIZE):
        rank.step([0], {}, num_proposals=0)
    first = rank.known[0] - 1
    for _ in range(6):
        rank.step([0], {}, num_proposals=3)
        begin = first // BLOCK_SIZE * BLOCK_SIZE
        drafts = plain.drafts(rank.tokens(0), len(rank.drafts[0]), begin=begin, num_zeros=first - begin)
        assert rank.drafts[0] == drafts


def test_ranks_whose_drafts_were_rounded_apart_cut_where_the_first_does(
    tmp_path: Path, method: Method, target: Decoder, plain: PlainEagle
) -> None:
    """One that cuts runs kernel by kernel, and must not be alone with it: the others would capture without it."""
    head, first_blocks = load(write_head(tmp_path, method, head_tensors(method)), method, target), iter([0, 4])
    rank = Rank(target, head, agree=lambda found: torch.full_like(found, next(first_blocks)))
    start = prompt(17, seed=4)
    rank.add(0, start)
    rank.step([], {0: 17}, num_proposals=3)
    rank.add(1, start)
    rank.share(0, 1, num_blocks=4)
    rank.step([], {1: 1}, num_proposals=3)
    assert rank.drafts[1] == plain.drafts(rank.tokens(1), 3, begin=4 * BLOCK_SIZE)
    assert rank.drafts[1] != plain.drafts(rank.tokens(1), 3)


def test_a_prompt_that_it_was_not_shown_is_not_attended_to(rank: Rank, plain: PlainEagle) -> None:
    rank.add(0, prompt(8, seed=5))
    rank.step([], {0: 8}, num_proposals=0)
    for _ in range(3):
        rank.step([0], {}, num_proposals=2)
        assert rank.drafts[0] == plain.drafts(rank.tokens(0), len(rank.drafts[0]), begin=8)


def test_a_prompt_shown_from_its_second_chunk_on_is_attended_to_from_there(rank: Rank, plain: PlainEagle) -> None:
    rank.add(0, prompt(14, seed=6))
    for length, num_proposals in ((8, 0), (3, 2), (3, 2)):
        rank.step([], {0: length}, num_proposals)
    assert rank.drafts[0] == plain.drafts(rank.tokens(0), len(rank.drafts[0]), begin=8)


def test_sequences_that_come_back_together_are_looked_at_a_few_at_a_time(
    tmp_path: Path, method: Method, target: Decoder, plain: PlainEagle
) -> None:
    """Each as far as those of its part are long, whatever order they come in."""
    folder = write_head(tmp_path, method, head_tensors(method))
    rank = Rank(target, load(folder, method, target, most_looked_at=40))
    lengths = {0: 8, 1: 20, 2: 16}
    for row, length in lengths.items():
        rank.add(row, prompt(length, seed=row))
        rank.step([], {row: length}, num_proposals=0)
    rank.while_proposing = gathered = Gathered()
    rank.step([0, 1, 2], {}, num_proposals=2)
    assert {(2, 16), (1, 20)} <= set(gathered.shapes)
    assert not {(3, 20), (2, 20)} & set(gathered.shapes)
    for row, length in lengths.items():
        assert rank.drafts[row] == plain.drafts(rank.tokens(row), len(rank.drafts[row]), begin=length)


def test_a_small_hole_leaves_the_context_as_it_is(tmp_path: Path, method: Method, target: Decoder) -> None:
    attention = NotingAttention()
    rank = Rank(target, load(write_head(tmp_path, method, head_tensors(method)), method, target, backend=attention))
    rank.add(0, prompt(40, seed=7))
    rank.step([], {0: 40}, num_proposals=2)
    for num_proposals in (0, 0, 2):
        rank.step([0], {}, num_proposals)
    assert int(attention.prepared[-1].seq_lens[0]) > 40, "none of its keys is cut off"
    assert rank.drafts[0]


def test_cached_blocks_that_a_head_was_not_shown_are_not_attended_to(rank: Rank, plain: PlainEagle) -> None:
    start = prompt(9, seed=9)
    rank.add(0, start)
    rank.step([], {0: 9}, num_proposals=0)
    rank.add(1, start)
    rank.share(0, 1, num_blocks=2)
    rank.step([], {1: 1}, num_proposals=2)
    assert rank.drafts[1] == plain.drafts(rank.tokens(1), len(rank.drafts[1]), begin=8)


def test_neighbours_keep_their_whole_context(rank: Rank, plain: PlainEagle) -> None:
    rank.add(0, prompt(8, seed=5))
    rank.step([], {0: 8}, num_proposals=0)
    rank.add(1, prompt(9, seed=6))
    rank.step([0], {1: 9}, num_proposals=2)
    rank.step([0, 1], {}, num_proposals=2)
    assert_drafts(rank, 1, plain, most=2)


@dataclass(frozen=True)
class PlainTarget:
    model: transformers.LlamaForCausalLM

    @torch.inference_mode()
    def continuation(self, token_ids: list[int], length: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(length):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(token_ids) :]


def test_a_head_with_an_embedding_and_a_bias_of_its_own_uses_them(
    tmp_path: Path, target: Decoder, hf_target: transformers.LlamaForCausalLM
) -> None:
    own = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(4))
    tensors = head_tensors("eagle") | {"embed_tokens.weight": own, "fc.bias": torch.ones(SIZE)}
    head = load_eagle1(write_head(tmp_path, "eagle", tensors), target, PLACEMENT, MAX_MODEL_LEN)
    assert torch.equal(head.embedding(torch.tensor([5])), own[5:6])
    fused = head.fusion(torch.zeros(1, 2 * SIZE))
    assert torch.equal(fused, torch.ones(1, SIZE))


def test_without_named_layers_eagle3_reads_low_middle_and_high_ones(tmp_path: Path, target: Decoder) -> None:
    folder = write_head(tmp_path, "eagle3", head_tensors("eagle3"), eagle_config=None)
    assert load_eagle3(folder, target, PLACEMENT, MAX_MODEL_LEN).captured_layers == (2, 1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 99}, "vocab_size is 99, the target's is 61"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            r"layers \[0, 1, 3\], but the target has 3",
        ),
    ],
)
def test_a_head_for_another_target_is_refused(
    tmp_path: Path, target: Decoder, changes: dict[str, Any], message: str
) -> None:
    folder = write_head(tmp_path, "eagle3", head_tensors("eagle3"), **changes)
    with pytest.raises(ConfigurationError, match=message):
        load_eagle3(folder, target, PLACEMENT, MAX_MODEL_LEN)


def test_an_eagle_head_of_another_hidden_size_is_refused(tmp_path: Path, target: Decoder) -> None:
    folder = write_head(tmp_path, "eagle", head_tensors("eagle"), hidden_size=64)
    with pytest.raises(ConfigurationError, match="size 64, the target's have size 32"):
        load_eagle1(folder, target, PLACEMENT, MAX_MODEL_LEN)


def test_a_small_vocabulary_without_a_map_is_refused(tmp_path: Path, target: Decoder) -> None:
    tensors = head_tensors("eagle3")
    del tensors["d2t"]
    with pytest.raises(ConfigurationError, match="draft_vocab_size 24 is not the target's 61"):
        load_eagle3(write_head(tmp_path, "eagle3", tensors), target, PLACEMENT, MAX_MODEL_LEN)


def test_a_map_out_of_the_vocabulary_is_refused(tmp_path: Path, target: Decoder) -> None:
    tensors = head_tensors("eagle3") | {"d2t": torch.full((DRAFT_VOCAB,), VOCAB - DRAFT_VOCAB + 1)}
    with pytest.raises(ConfigurationError, match="d2t names tokens outside"):
        load_eagle3(write_head(tmp_path, "eagle3", tensors), target, PLACEMENT, MAX_MODEL_LEN)


def test_a_head_of_the_other_kind_is_refused(tmp_path: Path, target: Decoder) -> None:
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_eagle1(write_head(tmp_path, "eagle", head_tensors("eagle3")), target, PLACEMENT, MAX_MODEL_LEN)
