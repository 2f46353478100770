"""Sampled tokens have the target's distribution whatever was drafted: chi-square over 100,000 draws."""

from typing import Any

import pytest
import torch

from kvasir_runtime.execution.sampler import draw
from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder
from kvasir_runtime.kernels.sample import DrawnPositions, KnownTokens
from kvasir_runtime.kernels.step_ops import cpu_step_ops

NUM_ROWS, NUM_ROUNDS, VOCAB_SIZE, NUM_DRAFTS = 1_000, 100, 20, 2
ONE_IN_10_000 = 3.719
"""Standard deviations that a normal variable exceeds as rarely; the seeds are fixed."""
LOGITS = torch.randn(1 + NUM_DRAFTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5


def likely(place: int) -> torch.Tensor:
    return LOGITS[place].argmax().expand(NUM_ROWS)


def any_token(place: int) -> torch.Tensor:
    return torch.arange(NUM_ROWS) % VOCAB_SIZE


def expected_of(temperature: float, top_k: int = VOCAB_SIZE, top_p: float = 1.0) -> torch.Tensor:
    """Of each place the distribution asked for: the `top_k` likeliest, and of these the fewest that make `top_p`."""
    chances, tokens = (LOGITS.double() / temperature).softmax(-1).sort(descending=True)
    chances[:, top_k:] = 0
    chances /= chances.sum(-1, keepdim=True)
    chances = torch.where(chances.cumsum(-1) - chances < top_p, chances, 0)
    return torch.zeros_like(chances).scatter(1, tokens, chances / chances.sum(-1, keepdim=True))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """What a true distribution exceeds once in 10,000 times (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + ONE_IN_10_000 * part**0.5) ** 3)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 12, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("drafted", [likely, any_token])
def test_tokens_after_any_draft_have_the_targets_distribution(
    drafted: Any, sampling: Any, make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows(max_num_seqs=NUM_ROWS, max_model_len=8, vocab_size=VOCAB_SIZE, max_drafts=NUM_DRAFTS)
    ops, known = cpu_step_ops(), KnownTokens(rows.token_ids, rows.num_known, rows.num_computed, rows.drafts)
    rows.apply(make_plan(added=[new_sequence(row, [1], 1, **sampling) for row in range(NUM_ROWS)]))
    plan = make_plan(decodes=[(row, 1 + NUM_DRAFTS) for row in range(NUM_ROWS)])
    counts = torch.zeros(1 + NUM_DRAFTS, VOCAB_SIZE, dtype=torch.float64)
    for number in range(NUM_ROUNDS):
        rows.sampling.seeds[:] = torch.arange(NUM_ROWS) + number * NUM_ROWS
        rows.num_known[:], rows.num_computed[:] = 1, 0
        for place in range(NUM_DRAFTS):
            rows.drafts[:, place] = drafted(place)
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        after = torch.arange(1 + NUM_DRAFTS).repeat(NUM_ROWS)
        token_ids = draw(LOGITS.repeat(NUM_ROWS, 1), rows, positions, after, ops)
        drawn = DrawnPositions(after, positions.starts, positions.rows, positions.draws, positions.width)
        verified = ops.verify_drafts(token_ids, drawn, known)
        has_second = verified.num_accepted > 1
        assert torch.equal(has_second, verified.token_ids[:, 0] == drafted(0)), "where the first draft held, only there"
        for place in range(1 + NUM_DRAFTS):
            kept = verified.token_ids[verified.num_accepted > place, place].long()
            counts[place] += torch.bincount(kept, minlength=VOCAB_SIZE)
    expected = expected_of(**sampling)
    assert counts[0].sum() == NUM_ROWS * NUM_ROUNDS
    for own, chances in zip(counts, expected, strict=True):
        possible = chances > 0
        assert not own[~possible].any()
        if own.sum() > 1_000:
            limit = chi_square_limit(int(possible.sum()) - 1)
            assert chi_square(own[possible], chances[possible]) < limit
    chance = float(expected[0][drafted(0)].mean())
    assert counts[1].sum() / counts[0].sum() == pytest.approx(chance, rel=0.1), "a draft holds as often as it is drawn"
