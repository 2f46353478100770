"""Which of the drawn tokens count: stop tokens, lengths and counts, over rows as planning left them."""

import numpy as np
import pytest
from tests.runtime.scheduling.rows_by_hand import PROMPT, make_rows, occupy

from kvasir_runtime.requests.outputs import PlainTokens
from kvasir_runtime.scheduling.running_rows import DrawnTokens, KeptTokens, RunningRows


def draw(rows: RunningRows, lines: dict[int, list[int]], *, most: int | None = None) -> KeptTokens:
    """Row -> the tokens of a step that was planned to bring `most` (None: as many as it brought), all under way."""
    numbers = np.array(list(lines), dtype=np.int64)
    num_accepted = np.array([len(line) for line in lines.values()])
    brought = np.full(len(lines), most) if most is not None else num_accepted.copy()
    rows.most_planned[numbers] = rows.most_known[numbers] - 1 + brought
    rows.most_known[numbers] += brought
    width = max(map(len, lines.values()))
    token_ids = np.array([line + [777] * (width - len(line)) for line in lines.values()], dtype=np.int32)
    return rows.keep(DrawnTokens(numbers, token_ids, num_accepted, brought))


def test_tokens_are_appended_and_the_last_one_is_not_written_yet():
    rows = make_rows()
    row = occupy(rows)
    kept = draw(rows, {row: [50]})
    assert rows.known(row).tolist() == [*PROMPT, 50]
    assert (rows.num_known[row], rows.num_written[row], rows.most_known[row], rows.most_planned[row]) == (4, 3, 4, 3)
    assert not kept.has_ended.any()


def test_accepted_drafts_are_appended_with_the_token_after_them():
    rows = make_rows()
    short, long = occupy(rows), occupy(rows)
    kept = draw(rows, {short: [50], long: [60, 61, 62]}, most=4)
    assert rows.known(short).tolist() == [*PROMPT, 50]
    assert rows.known(long).tolist() == [*PROMPT, 60, 61, 62]
    assert kept.num_kept.tolist() == [1, 3]
    assert rows.token_ids[short, 4] == 0, "the padding of a line is not kept"


def test_drafts_that_did_not_hold_lower_what_planning_counted_with():
    rows = make_rows()
    row = occupy(rows)
    rows.most_known[row] += 3  # of a later step
    draw(rows, {row: [50, 51]}, most=4)
    assert (rows.num_known[row], rows.most_known[row], rows.most_planned[row]) == (5, 8, 7)


@pytest.mark.parametrize(("line", "kept"), [([9, 5, 6], 1), ([5, 9, 6], 2), ([5, 6, 9], 3)])
def test_a_stop_token_inside_accepted_drafts_ends_the_sequence_there(line, kept):
    rows = make_rows()
    row = occupy(rows, stop=(9,))
    result = draw(rows, {row: line})
    assert (result.num_kept.tolist(), result.is_stop.tolist()) == ([kept], [True])
    assert rows.known(row).tolist() == PROMPT + line[:kept]


def test_the_first_of_several_stop_tokens_counts():
    rows = make_rows()
    row = occupy(rows, stop=(8, 9))
    assert draw(rows, {row: [5, 9, 8]}).num_kept.tolist() == [2]


def test_a_stop_token_behind_what_was_accepted_does_not_count():
    rows = make_rows()
    short, long = occupy(rows, stop=(777,)), occupy(rows, stop=(777,))
    kept = draw(rows, {short: [50], long: [60, 61]})
    assert (kept.num_kept.tolist(), kept.is_stop.tolist()) == ([1, 2], [False, False])


def test_each_row_has_its_own_stop_tokens():
    rows = make_rows()
    none, one, two = occupy(rows), occupy(rows, stop=(5,)), occupy(rows, stop=(6, 5))
    kept = draw(rows, {none: [5], one: [5], two: [5]})
    assert kept.is_stop.tolist() == [False, True, True]


def test_a_row_forgets_the_stop_tokens_of_its_former_occupant():
    rows = make_rows()
    row = occupy(rows, stop=(5, 6))
    rows.vacate(row)
    assert occupy(rows, stop=(7,)) == row
    assert draw(rows, {row: [5, 6, 7]}).num_kept.tolist() == [3]


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_a_stop_token_counts_from_the_token_after_min_tokens(min_tokens, kept):
    rows = make_rows()
    row = occupy(rows, stop=(9,), min_tokens=min_tokens)
    result = draw(rows, {row: [9, 9, 9, 9]})
    assert (result.num_kept.tolist(), result.is_stop.tolist()) == ([kept], [True])


def test_min_tokens_counts_output_not_prompt_of_a_sequence_that_comes_back():
    rows = make_rows()
    row = occupy(rows, stop=(9,), min_tokens=2, known=[*PROMPT, 50])
    assert draw(rows, {row: [9]}).is_stop.tolist() == [False]
    assert draw(rows, {row: [9]}).is_stop.tolist() == [True]


@pytest.mark.parametrize(("max_total", "is_full"), [(5, True), (6, False)])
def test_a_sequence_is_full_at_max_total(max_total, is_full):
    rows = make_rows()
    row = occupy(rows, max_total=max_total)
    kept = draw(rows, {row: [50, 51]})
    assert (kept.is_full.tolist(), kept.has_ended.tolist()) == ([is_full], [is_full])


def test_a_stop_token_as_the_last_token_allowed_is_both():
    rows = make_rows()
    row = occupy(rows, max_total=4, stop=(9,))
    kept = draw(rows, {row: [9]})
    assert (kept.is_stop.tolist(), kept.is_full.tolist()) == ([True], [True])


def test_a_beam_draws_nothing_and_is_planned_on_when_it_gets_its_token():
    rows = make_rows()
    beam, other = occupy(rows, is_grouped=True, max_total=3), occupy(rows)
    assert rows.waits_for_result[[beam, other]].tolist() == [True, False]
    kept = draw(rows, {beam: [], other: [50]}, most=1)
    assert (kept.num_kept.tolist(), kept.has_ended.tolist()) == ([0, 1], [False, False])
    assert (rows.num_written[beam], rows.most_known[beam], rows.most_planned[beam]) == (3, 3, 3)
    rows.append(beam, 70)
    assert rows.known(beam).tolist() == [*PROMPT, 70]
    assert (rows.num_written[beam], rows.most_known[beam], rows.most_planned[beam]) == (3, 4, 3)


def test_outputs_that_are_nothing_but_tokens_go_in_columns():
    rows = make_rows()
    first, second = occupy(rows), occupy(rows, index=2)
    kept = draw(rows, {first: [50], second: [60, 61]})
    expected = PlainTokens(["api-0", "api-0"], [0, 2], [1, 2], [50, 60, 61])
    assert rows.plain_tokens(kept, np.array([0, 1])) == {0: expected}
    assert rows.plain_tokens(kept, np.array([1])) == {0: PlainTokens(["api-0"], [2], [2], [60, 61])}
    assert rows.plain_tokens(kept, np.array([], dtype=np.int64)) == {}


def test_columns_are_parted_by_api_process():
    rows = make_rows()
    lines = {occupy(rows, api_index=index): [50 + place] for place, index in enumerate((1, 0, 1))}
    kept = draw(rows, lines)
    assert rows.plain_tokens(kept, np.array([0, 1, 2])) == {
        0: PlainTokens(["api-0"], [0], [1], [51]),
        1: PlainTokens(["api-1", "api-1"], [0, 0], [1, 1], [50, 52]),
    }


def test_columns_stop_at_a_stop_token():
    rows = make_rows()
    row = occupy(rows, stop=(9,))
    kept = draw(rows, {row: [50, 9, 51]})
    assert rows.plain_tokens(kept, np.array([0]))[0].token_ids == [50, 9]
