"""Rows of running sequences: taking, occupying, giving back."""

import numpy as np
import pytest
from tests.runtime.scheduling.rows_by_hand import PROMPT, make_rows, occupy

from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.running_rows import NO_TOKEN, RunningRows, where


def test_rows_are_taken_from_the_first_and_the_last_given_back_is_taken_again():
    rows = make_rows()
    assert [rows.take_row() for _ in range(3)] == [0, 1, 2]
    given = [1, 0]
    rows.give_back(given)
    assert (given, rows.num_free) == ([], 3)
    assert [rows.take_row() for _ in range(3)] == [0, 1, 3]


def test_a_particular_row_can_be_reserved():
    rows = make_rows()
    rows.reserve(2)
    assert [rows.take_row() for _ in range(3)] == [0, 1, 3]


def test_an_occupied_row_begins_with_what_is_known_and_computed():
    rows = make_rows()
    row = occupy(rows, stop=(5,), min_tokens=2, max_total=17, api_index=3, index=1)
    sequence = rows.sequences[row]
    assert sequence.row == row
    assert rows.known(row).tolist() == PROMPT
    assert (rows.num_known[row], rows.most_known[row], rows.num_written[row], rows.most_planned[row]) == (3, 3, 0, 0)
    assert (rows.max_total[row], rows.first_stop[row]) == (17, len(PROMPT) + 2 + 1)
    assert (rows.request_ids[row], rows.indices[row], rows.api_index[row]) == ("api-3", 1, 3)


def test_a_new_occupant_is_told_from_the_former_and_inherits_nothing():
    rows = make_rows()
    row = occupy(rows)
    rows.is_awaited[row], rows.num_ready_drafts[row] = True, 2
    rows.capacity[row] = 8
    before = int(rows.generation[row])
    rows.vacate(row)
    assert (rows.sequences[row], rows.capacity[row]) == (None, 0)
    assert rows.generation[row] > before, "results of steps under way are for nobody"
    vacated = int(rows.generation[row])
    assert occupy(rows) == row
    assert (rows.is_awaited[row], rows.num_ready_drafts[row]) == (False, 0)
    assert rows.generation[row] > vacated


@pytest.mark.parametrize(
    ("has_sent_output", "logprobs", "is_plain"),
    [(False, None, False), (True, None, True), (True, 0, False), (False, 0, False)],
)
def test_an_output_is_plain_after_the_first_unless_logprobs_are_wanted(has_sent_output, logprobs, is_plain):
    rows = make_rows()
    sequence = rows.sequences[occupy(rows)]
    sequence.has_sent_output = has_sent_output
    sequence.sampling = SamplingParams(max_tokens=1, seed=0, logprobs=logprobs)
    rows.refresh(sequence)
    assert rows.is_plain[sequence.row] == is_plain


def test_refreshing_takes_over_the_blocks_capacity_and_boundary():
    rows = make_rows()
    sequence = rows.sequences[occupy(rows)]
    sequence.blocks.tables[0].extend([None, None])
    sequence.blocks.num_offered = 1
    rows.refresh(sequence)
    assert (rows.capacity[sequence.row], rows.next_boundary[sequence.row]) == (8, 8)


def test_stop_tokens_take_as_many_columns_as_the_longest_list():
    rows = make_rows()
    first, second = occupy(rows, stop=(5,)), occupy(rows, stop=(6, 7, 8))
    assert rows.stop_ids[first].tolist() == [5, NO_TOKEN, NO_TOKEN]
    assert rows.stop_ids[second].tolist() == [6, 7, 8]
    assert (rows.stop_ids[2:] == NO_TOKEN).all()


def test_columns_of_stop_tokens_end_with_the_sequence_that_needed_them():
    rows = make_rows()
    wide, none, narrow = occupy(rows, stop=tuple(range(5, 12))), occupy(rows), occupy(rows, stop=(6, 7))
    rows.vacate(none)
    assert rows.stop_ids.shape == (4, 7)
    rows.vacate(wide)
    assert rows.stop_ids[narrow].tolist() == [6, 7]
    rows.vacate(narrow)
    assert rows.stop_ids.shape == (4, 1)
    assert rows.stop_ids[occupy(rows, stop=(9,))].tolist() == [9]


def test_columns_of_stop_tokens_stay_for_another_that_needs_as_many():
    rows = make_rows()
    first, second = occupy(rows, stop=(5, 6)), occupy(rows, stop=(7, 8))
    rows.vacate(first)
    assert rows.stop_ids[second].tolist() == [7, 8]


def test_a_new_occupant_has_no_drafts_to_tell_earlier_stages():
    rows = RunningRows(4, 32, num_stages=2, max_drafts=2)
    row = occupy(rows)
    rows.drafts[row] = [7, 8]
    rows.vacate(row)
    assert occupy(rows) == row
    assert rows.drafts[row].tolist() == [-1, -1]
    assert rows.num_returned[row] == len(PROMPT)
    assert rows.waits_for_result[row]


@pytest.mark.parametrize("mask", [[], [False], [True], [True, False, True], [False, False], [True, True]])
def test_where_a_mask_is_true_is_what_it_chooses_itself(mask):
    mask = np.array(mask, dtype=np.bool_)
    values = np.arange(len(mask)) + 10
    assert values[where(mask)].tolist() == values[mask].tolist()


def test_where_all_of_a_mask_is_true_nothing_is_copied():
    values = np.arange(3)
    assert np.shares_memory(values[where(np.array([True, True, True]))], values)
