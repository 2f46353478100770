"""What beams' logits become before candidates are taken from them."""

from typing import Any

import torch

from kvasir_runtime.execution.step_features import BeamCandidates
from kvasir_runtime.execution.step_inputs import SampledPositionsBuilder


def test_candidates_are_compared_in_float32_without_what_is_not_a_number(
    make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows()
    plan = make_plan(decodes=[(0, 1), (1, 1)], added=[new_sequence(0, [1]), new_sequence(1, [1], candidates=2)])
    rows.apply(plan)
    beams = BeamCandidates(rows)
    raw = torch.randn((2, 100), generator=torch.Generator().manual_seed(0)).bfloat16()
    raw[1, 5] = float("nan")
    logits = beams.adjust(raw, SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens))
    assert logits.dtype == torch.float32
    assert logits[0].equal(raw[0].float())
    assert logits[1, 5] == float("-inf")
    torch.testing.assert_close(logits[1].exp().sum(), torch.tensor(1.0))


def test_a_beam_draws_nothing_though_its_parameters_draw_by_chance(
    make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any
) -> None:
    rows = make_rows()
    params = {"temperature": 1.0, "top_p": 0.5}
    added = [new_sequence(0, [1], **params), new_sequence(1, [1], candidates=2, **params)]
    plan = make_plan(decodes=[(0, 1), (1, 1)], added=added)
    rows.apply(plan)
    positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
    assert positions.random is not None
    assert positions.random.host_index.tolist() == [0]
    assert positions.draws.tolist() == [True, False]
