"""Sampled tokens have the target's distribution whatever was drafted: chi-square over 100,000 draws."""

from typing import Any

import pytest
import torch

from kvasir_runtime.execution.sampled_positions import SampledPositionsBuilder
from kvasir_runtime.execution.sampler import adjusted_logits, draw
from kvasir_runtime.kernels.step_ops import cpu_step_ops
from kvasir_runtime.kernels.verify_drafts import DrawnTokens, KnownTokens

NUM_ROWS, NUM_ROUNDS, VOCAB_SIZE, NUM_DRAFTS = 1_000, 100, 20, 2
CHI_SQUARE_LIMIT = 50.8
"""Of 19 degrees of freedom; a true distribution exceeds it once in 10,000 seeds, and the seeds are fixed."""
LOGITS = torch.randn(1 + NUM_DRAFTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5
EXPECTED = LOGITS.softmax(-1).double()


def likely(place: int) -> torch.Tensor:
    return LOGITS[place].argmax().expand(NUM_ROWS)


def any_token(place: int) -> torch.Tensor:
    return torch.arange(NUM_ROWS) % VOCAB_SIZE


def chi_square(counts: torch.Tensor, place: int) -> float:
    expected = EXPECTED[place] * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("drafted", [likely, any_token])
def test_tokens_after_any_draft_have_the_targets_distribution(
    drafted: Any, make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows(max_num_seqs=NUM_ROWS, max_model_len=8, vocab_size=VOCAB_SIZE, max_drafts=NUM_DRAFTS)
    ops, known = cpu_step_ops(), KnownTokens(rows.token_ids, rows.num_known, rows.num_computed, rows.drafts)
    rows.apply(make_plan(added=[new_sequence(row, [1], 1, temperature=1.0) for row in range(NUM_ROWS)]))
    plan = make_plan(decodes=[(row, 1 + NUM_DRAFTS) for row in range(NUM_ROWS)])
    counts = torch.zeros(1 + NUM_DRAFTS, VOCAB_SIZE, dtype=torch.float64)
    num_held = 0
    for number in range(NUM_ROUNDS):
        rows.sampling.seeds[:] = torch.arange(NUM_ROWS) + number * NUM_ROWS
        rows.num_known[:], rows.num_computed[:] = 1, 0
        for place in range(NUM_DRAFTS):
            rows.drafts[:, place] = drafted(place)
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        after = torch.arange(1 + NUM_DRAFTS).repeat(NUM_ROWS)
        logits = adjusted_logits(LOGITS.repeat(NUM_ROWS, 1), rows, positions, after + 1, None)
        token_ids = draw(logits, rows, positions, after + 1, ops)
        drawn = DrawnTokens(token_ids, after, positions.starts, positions.rows, positions.draws, positions.width)
        verified = ops.verify_drafts(drawn, known)
        for place in range(1 + NUM_DRAFTS):
            kept = verified.token_ids[verified.num_accepted > place, place].long()
            counts[place] += torch.bincount(kept, minlength=VOCAB_SIZE)
        num_held += int((verified.num_accepted > 1).sum())
    assert counts[0].sum() == NUM_ROWS * NUM_ROUNDS
    assert counts[1].sum() == num_held, "a second token comes where the first draft held, and only there"
    for place in range(1 + NUM_DRAFTS):
        if counts[place].sum() > 1_000:
            assert chi_square(counts[place], place) < CHI_SQUARE_LIMIT
    chance = float(EXPECTED[0][drafted(0)].mean())
    assert num_held / counts[0].sum() == pytest.approx(chance, rel=0.1), "a draft holds as often as it is drawn"
