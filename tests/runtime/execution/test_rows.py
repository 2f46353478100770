"""Rows take over a plan's differences, in its order."""

from typing import Any

import msgspec
import numpy as np
import torch

from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork, ReturnedTokens

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)


def test_a_new_sequence_forgets_what_its_row_held(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(1, [5, 6, 7, 8], candidates=3, temperature=1.0)]))
    rows.drafts[1] = 9
    rows.apply(make_plan(added=[new_sequence(1, [30, 31, 32], prompt=2, computed=1)]))
    assert rows.token_ids[1, :3].tolist() == [30, 31, 32]
    assert [int(t[1]) for t in (rows.num_known, rows.num_computed, rows.num_prompt_tokens)] == [3, 1, 2]
    assert rows.drafts[1].tolist() == [-1, -1]
    assert (rows.num_candidates[1], rows.prompt_lens[1], rows.sampling.traits[1]) == (0, 2, 0)


def test_several_sequences_arrive_at_once(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(3, [1, 2, 3]), new_sequence(0, [4]), new_sequence(2, [5, 6])]))
    assert [rows.token_ids[row, :n].tolist() for row, n in ((3, 3), (0, 1), (2, 2))] == [[1, 2, 3], [4], [5, 6]]
    assert rows.num_known.tolist() == [1, 0, 2, 3]


def test_table_writes_name_row_group_and_index(make_rows: Any, make_plan: Any) -> None:
    rows = make_rows(num_groups=2)
    rows.apply(make_plan(tables=[(2, 1, 3, 77), (0, 0, 0, 5)]))
    assert rows.block_tables[1, 2].tolist() == [0, 0, 0, 77]
    assert rows.block_tables[0, 0].tolist() == [5, 0, 0, 0]
    assert int(rows.block_tables.sum()) == 82


def test_a_row_has_room_for_the_positions_of_its_own_blocks(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows(num_groups=2)
    rows.apply(make_plan(tables=[(0, 0, 0, 5), (0, 0, 2, 6), (0, 0, 1, 7), (1, 1, 1, 8)]))
    rows.apply(make_plan(tables=[(0, 1, 0, 9)]))
    assert rows.num_slots.tolist() == [12, 8, 0, 0]
    rows.apply(make_plan(forks=[Fork(0, 2, GREEDY)], tables=[(2, 0, 0, 3)]))
    assert rows.num_slots.tolist() == [12, 8, 4, 0], "a fork's writes say which blocks it shares"
    rows.apply(make_plan(added=[new_sequence(0, [1])], forks=[Fork(0, 1, GREEDY)]))
    assert rows.num_slots.tolist() == [0, 0, 4, 0]


def test_the_highest_block_of_any_row_is_remembered(make_rows: Any, make_plan: Any) -> None:
    rows = make_rows()
    assert rows.num_blocks_used == 0
    rows.apply(make_plan(tables=[(0, 0, 0, 0)]))
    assert rows.num_blocks_used == 1
    rows.apply(make_plan(tables=[(1, 0, 0, 4), (1, 0, 1, 2)]))
    rows.apply(make_plan(tables=[(0, 0, 0, 3)]))
    assert rows.num_blocks_used == 5


def test_a_written_token_is_the_last_known(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(0, [1, 2]), new_sequence(1, [3, 4, 5])]))
    rows.apply(make_plan(tokens=[(1, 3, 50), (0, 2, 60), (0, 3, 61)]))
    assert rows.token_ids[0, :4].tolist() == [1, 2, 60, 61]
    assert rows.token_ids[1, :4].tolist() == [3, 4, 5, 50]
    assert rows.num_known[:2].tolist() == [4, 4]


def test_a_fork_is_a_copy_with_its_own_sampling(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    added = new_sequence(0, [1, 2, 3], prompt=2, computed=2, candidates=4)
    rows.apply(make_plan(added=[added], tables=[(0, 0, 0, 8)]))
    rows.drafts[0] = 7
    sampling = SamplingParams(max_tokens=8, seed=2**64 - 1, temperature=0.5)
    rows.apply(make_plan(forks=[Fork(0, 3, sampling)]))
    assert rows.token_ids[3, :3].tolist() == [1, 2, 3]
    assert [int(t[3]) for t in (rows.num_known, rows.num_computed, rows.num_prompt_tokens)] == [3, 2, 2]
    assert rows.block_tables[0, 3].tolist() == [8, 0, 0, 0]
    assert rows.drafts[3].tolist() == [7, 7]
    assert (rows.num_candidates[3], rows.prompt_lens[3]) == (4, 2)
    assert rows.sampling.seeds[[0, 3]].tolist() == [0, -1]
    assert float(rows.sampling.inverse_temperature[3]) == 2.0


def test_a_row_has_the_extra_keys_of_its_sequence_and_a_fork_its_sources(
    make_rows: Any, make_plan: Any, new_sequence: Any
) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(row, [1], salt=str(row)) for row in (0, 1)]))
    rows.apply(make_plan(forks=[Fork(0, 1, GREEDY), Fork(1, 2, GREEDY)]))
    assert rows.extra_keys == [(b"0",), (b"0",), (b"1",), ()]
    rows.apply(make_plan(added=[new_sequence(0, [1])]))
    assert rows.extra_keys[0] == ()


def test_forks_happen_at_once(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(row, [10 + row, 20 + row]) for row in range(3)]))
    rows.apply(make_plan(forks=[Fork(0, 1, GREEDY), Fork(1, 2, GREEDY), Fork(2, 0, GREEDY)]))
    assert rows.token_ids[:3, :2].tolist() == [[12, 22], [10, 20], [11, 21]]


def test_forks_see_the_plans_new_sequences_and_writes_come_after_them(
    make_rows: Any, make_plan: Any, new_sequence: Any
) -> None:
    rows = make_rows()
    rows.apply(
        make_plan(
            added=[new_sequence(0, [1, 2])],
            forks=[Fork(0, 1, GREEDY)],
            tables=[(1, 0, 0, 9)],
            tokens=[(1, 2, 3)],
        )
    )
    assert rows.token_ids[1, :3].tolist() == [1, 2, 3]
    assert rows.num_known[:2].tolist() == [2, 3]
    assert rows.block_tables[0, :2, 0].tolist() == [0, 9]


def test_lists_of_tokens_are_as_wide_as_the_longest_there_is(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    wide = {"logit_bias": {5: 1.0, 6: 2.0, 7: 3.0}, "min_tokens": 2, "stop_token_ids": (8, 9, 10, 11)}
    narrow = {"logit_bias": {4: 4.0, 3: 5.0}, "min_tokens": 2, "stop_token_ids": (12, 13)}
    rows.apply(make_plan(added=[new_sequence(0, [1], **wide), new_sequence(1, [1], **narrow)]))
    sampling = rows.sampling
    assert [sampling.bias_token_ids.shape[1], sampling.stop_token_ids.shape[1]] == [3, 4]
    rows.apply(make_plan(added=[new_sequence(0, [1], stop_token_ids=(8, 9, 10))]))
    assert sampling.bias_token_ids[1].tolist() == [4, 3]
    assert sampling.bias_values[1].tolist() == [4.0, 5.0]
    assert sampling.stop_token_ids[1].tolist() == [12, 13]
    rows.apply(make_plan(added=[new_sequence(1, [1])]))
    assert [sampling.bias_values.shape[1], sampling.stop_token_ids.shape[1]] == [0, 0]


def test_only_differences_are_uploaded(make_rows: Any, make_plan: Any, new_sequence: Any, transfers: Any) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(0, [1, 2])]))
    transfers.uploads.clear()
    rows.apply(make_plan(decodes=[(0, 1)]))
    assert transfers.uploads == []
    rows.apply(make_plan(decodes=[(0, 1)], tables=[(0, 0, 1, 3)]))
    assert transfers.uploads == [16]


def returning(plan: Any, writes: list[list[int]], drafts: list[list[int]]) -> Any:
    token_writes = np.array(writes, dtype=np.int32).reshape(-1, 3)
    width = len(drafts[0]) if drafts else 0
    returned = ReturnedTokens(token_writes, np.array(drafts, dtype=np.int32).reshape(len(drafts), width))
    return msgspec.structs.replace(plan, returned=returned)


def test_earlier_stages_take_over_what_the_last_one_drew(make_rows: Any, make_plan: Any, new_sequence: Any) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(1, [5, 6]), new_sequence(3, [7, 8, 9])]))
    plan = returning(make_plan(decodes=[(3, 3), (1, 1)]), [[3, 3, 50], [3, 4, 51], [1, 2, 60]], [[52, -1], [-1, -1]])
    rows.take_returned(plan)
    assert rows.token_ids[3, :5].tolist() == [7, 8, 9, 50, 51]
    assert rows.token_ids[1, :3].tolist() == [5, 6, 60]
    assert [(int(rows.num_known[row]), int(rows.num_computed[row])) for row in (3, 1)] == [(5, 4), (3, 2)]
    assert rows.drafts[[3, 1]].tolist() == [[52, -1], [-1, -1]]


def test_a_beams_token_too_follows_computed_ones_on_earlier_stages(
    make_rows: Any, make_plan: Any, new_sequence: Any
) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(0, [5, 6])]))
    plan = returning(make_plan(decodes=[(0, 1)], tokens=[(0, 2, 9)]), [], [[]])
    rows.apply(plan)
    rows.take_returned(plan)
    assert (int(rows.num_known[0]), int(rows.num_computed[0])) == (3, 2)


def test_only_chunks_that_nothing_is_drawn_after_are_computed_at_once(
    make_rows: Any, make_plan: Any, new_sequence: Any
) -> None:
    rows = make_rows()
    rows.apply(make_plan(added=[new_sequence(0, [5] * 6), new_sequence(2, [6] * 6, computed=2)]))
    plan = make_plan(chunks=[(2, 2, 4, True), (0, 0, 4, False)])
    rows.advance_unsampled(plan, torch.tensor([6, 4], dtype=torch.int32))
    assert rows.num_computed[[0, 2]].tolist() == [4, 2]
