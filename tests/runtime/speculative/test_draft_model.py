"""Drafts of a draft model are its own greedy continuation, whatever was accepted, skipped or moved before."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.runtime.speculative.conftest import (
    BLOCK_SIZE,
    CPU_PLACEMENT,
    MAX_MODEL_LEN,
    Gathered,
    NotingAttention,
    Rank,
    continue_greedily,
    load,
    prompt,
)

from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.execution.graphs import STEPS_BEFORE_CAPTURE, GraphShape
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.speculative.draft_model import MOST_LACKING, DraftModelProposer

Greedy = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def hf_draft(draft_folder: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(draft_folder, dtype=torch.float32).eval()


@pytest.fixture
def rank(target: Decoder, draft_folder: Path) -> Rank:
    return Rank(target, DraftModelProposer(load(draft_folder), ReferenceAttention(), torch.float32))


@pytest.fixture
def twin(target: Decoder) -> Rank:
    """The draft is the target itself, so that every draft holds."""
    return Rank(target, DraftModelProposer(target, ReferenceAttention(), torch.float32))


def assert_drafts(rank: Rank, row: int, model: transformers.LlamaForCausalLM, most: int) -> None:
    """As many as there were blocks for, and those the draft's own continuation."""
    drafts = rank.drafts[row]
    blocks = -(-(rank.step_end(row)) // BLOCK_SIZE)
    assert len(drafts) == max(0, min(most, blocks * BLOCK_SIZE - (rank.known[row] - 1)))
    assert drafts == continue_greedily(model, rank.tokens(row), len(drafts))


def test_drafts_are_the_drafts_own_continuation(rank: Rank, hf_draft: transformers.LlamaForCausalLM) -> None:
    rank.add(0, prompt(9, seed=0))
    rank.step([], {0: 9}, num_proposals=3)
    for _ in range(12):
        assert_drafts(rank, 0, hf_draft, most=3)
        rank.step([0], {}, num_proposals=3)


def test_prompts_in_chunks_and_neighbours_change_nothing(rank: Rank, hf_draft: transformers.LlamaForCausalLM) -> None:
    rank.add(1, prompt(7, seed=1))
    rank.step([], {1: 7}, num_proposals=2)
    rank.add(2, prompt(14, seed=2))
    rank.step([1], {2: 5}, num_proposals=2)
    rank.step([1], {2: 6}, num_proposals=2)
    rank.step([1], {2: 3}, num_proposals=2)
    assert_drafts(rank, 2, hf_draft, most=2)
    rank.step([2, 1], {}, num_proposals=2)
    assert_drafts(rank, 1, hf_draft, most=2)
    assert_drafts(rank, 2, hf_draft, most=2)


def test_a_draft_that_is_the_target_is_always_right(twin: Rank, greedy: Greedy) -> None:
    start = prompt(6, seed=3)
    twin.add(0, start)
    twin.step([], {0: 6}, num_proposals=4)
    held = []
    while twin.known[0] < 40:
        asked = len(twin.drafts[0])
        held.append(twin.step([0], {}, num_proposals=4)[0] == asked)
    assert all(held)
    assert twin.tokens(0) == start + greedy(start, twin.known[0] - 6)


def test_drafts_stay_within_a_context_that_ends_in_the_middle_of_a_block(target_folder: Path, greedy: Greedy) -> None:
    """The rope tables end with the context, the blocks behind it."""
    short = load(target_folder, max_model_len=11)
    rank = Rank(short, DraftModelProposer(short, ReferenceAttention(), torch.float32), max_model_len=11)
    start = prompt(9, seed=3)
    rank.add(0, start)
    rank.step([], {0: 9}, num_proposals=6)
    assert rank.drafts[0][:2] == greedy([*start, rank.tokens(0)[-1]], 2)


def test_it_catches_up_after_steps_without_proposals(rank: Rank, hf_draft: transformers.LlamaForCausalLM) -> None:
    rank.add(0, prompt(6, seed=4))
    rank.step([], {0: 6}, num_proposals=3)
    for num_proposals in (0, 0, 0, 0, 3):
        rank.step([0], {}, num_proposals)
    assert rank.drafts[0]
    assert_drafts(rank, 0, hf_draft, most=3)


def test_recorded_passes_go_on_after_steps_without_proposals(
    target: Decoder, draft_folder: Path, hf_draft: transformers.LlamaForCausalLM
) -> None:
    draft = DraftModelProposer(load(draft_folder, placement=CPU_PLACEMENT), CpuAttention(), torch.float32)
    rank = Rank(target, draft, records=True)
    rank.add(0, prompt(6, seed=4))
    rank.step([], {0: 6}, num_proposals=3)
    for number in range(3 * STEPS_BEFORE_CAPTURE):
        rank.step([0], {}, num_proposals=0 if number % 8 > 5 else 3)
        if rank.drafts[0]:
            assert_drafts(rank, 0, hf_draft, most=3)
    assert rank.recorded == [GraphShape(1, 1)]


def test_a_sequence_far_behind_catches_up_over_steps(
    target: Decoder, draft_folder: Path, hf_draft: transformers.LlamaForCausalLM
) -> None:
    draft = DraftModelProposer(load(draft_folder), ReferenceAttention(), torch.float32, max_catch_up=4)
    rank = Rank(target, draft)
    rank.add(0, prompt(5, seed=5))
    rank.step([], {0: 5}, num_proposals=0)
    for _ in range(8):
        rank.step([0], {}, num_proposals=0)
    rank.step([0], {}, num_proposals=2)
    assert rank.drafts[0] == []
    while not rank.drafts[0]:
        rank.step([0], {}, num_proposals=2)
    assert_drafts(rank, 0, hf_draft, most=2)


def test_a_prompt_that_it_was_not_shown_is_made_up_for(rank: Rank, hf_draft: transformers.LlamaForCausalLM) -> None:
    rank.add(0, prompt(14, seed=10))
    for length, num_proposals in ((8, 0), (3, 2), (3, 2)):
        rank.step([], {0: length}, num_proposals)
    assert_drafts(rank, 0, hf_draft, most=2)


def test_entries_made_behind_a_gap_are_made_again_once_another_has_filled_the_gap(twin: Rank, greedy: Greedy) -> None:
    start = prompt(14, seed=14)
    twin.add(0, start)
    twin.step([], {0: 8}, num_proposals=0)
    twin.step([], {0: 5}, num_proposals=2)
    twin.add(1, start[:9])
    twin.share(0, 1, num_blocks=2)
    twin.step([], {1: 1}, num_proposals=2)
    twin.step([], {0: 1}, num_proposals=2)
    assert twin.drafts[0]
    assert twin.drafts[0] == greedy(twin.tokens(0), len(twin.drafts[0]))


def test_cached_blocks_that_it_was_not_shown_are_made_up_for(
    rank: Rank, hf_draft: transformers.LlamaForCausalLM
) -> None:
    start = prompt(9, seed=11)
    rank.add(0, start)
    rank.step([], {0: 9}, num_proposals=0)
    rank.add(1, start)
    rank.share(0, 1, num_blocks=2)
    rank.step([], {1: 1}, num_proposals=2)
    assert_drafts(rank, 1, hf_draft, most=2)


def test_a_sequence_in_step_computes_no_token_twice(target: Decoder, draft_folder: Path) -> None:
    attention = NotingAttention()
    rank = Rank(target, DraftModelProposer(load(draft_folder), attention, torch.float32))
    rank.add(0, prompt(9, seed=13))
    rank.step([], {0: 9}, num_proposals=2)
    attention.prepared.clear()
    for _ in range(4):
        rank.drafts[0] = [(draft + 1) % 61 for draft in rank.drafts[0]]  # wrong, so that none holds
        rank.step([0], {}, num_proposals=2)
    assert [len(inputs.positions) for inputs in attention.prepared] == [1, 1] * 4


def test_only_sequences_that_may_lack_more_are_looked_through(
    rank: Rank, hf_draft: transformers.LlamaForCausalLM
) -> None:
    for row, length in ((0, 30), (1, 7)):
        rank.add(row, prompt(length, seed=row))
        rank.step([], {row: length}, num_proposals=2 if row == 0 else 0)
    rank.step([0], {}, num_proposals=2)
    rank.while_proposing = gathered = Gathered()
    rank.step([0, 1], {}, num_proposals=2)
    assert {(2, MOST_LACKING), (1, rank.step_end(0))} <= set(gathered.shapes)
    assert (2, rank.step_end(0)) not in gathered.shapes
    assert_drafts(rank, 0, hf_draft, most=2)
    assert_drafts(rank, 1, hf_draft, most=2)


def test_a_row_that_another_sequence_took_starts_anew(rank: Rank, hf_draft: transformers.LlamaForCausalLM) -> None:
    rank.add(0, prompt(20, seed=6))
    rank.step([], {0: 20}, num_proposals=2)
    rank.step([0], {}, num_proposals=2)
    rank.add(0, prompt(5, seed=7))
    rank.step([], {0: 5}, num_proposals=2)
    assert_drafts(rank, 0, hf_draft, most=2)
    rank.step([0], {}, num_proposals=2)
    assert_drafts(rank, 0, hf_draft, most=2)


def test_a_forked_row_goes_on_from_its_source(rank: Rank, hf_draft: transformers.LlamaForCausalLM) -> None:
    rank.add(0, prompt(8, seed=8))
    rank.step([], {0: 8}, num_proposals=0)
    rank.fork(0, 1)
    for _ in range(3):
        rank.step([0, 1], {}, num_proposals=2)
        assert_drafts(rank, 1, hf_draft, most=2)


def test_nothing_is_written_behind_the_longest_sequence(twin: Rank) -> None:
    twin.add(0, prompt(MAX_MODEL_LEN - 4, seed=9))
    twin.step([], {0: MAX_MODEL_LEN - 4}, num_proposals=4)
    while twin.known[0] < MAX_MODEL_LEN:
        twin.drafts[0] = twin.drafts[0][: MAX_MODEL_LEN - twin.known[0]]
        twin.step([0], {}, num_proposals=4)
