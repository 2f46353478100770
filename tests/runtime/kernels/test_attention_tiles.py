"""How attention is cut: splits of decodes, tiles of prefill chunks."""

import numpy as np
import pytest

from kvasir_runtime.kernels.attention_tiles import (
    HeadShape,
    Splits,
    decode_tile,
    num_row_tiles,
    num_split_programs,
    prefill_tile,
    prefill_tiles,
    splits_for,
    workspace_floats,
)

H200_SMS = 132
LLAMA_8B = HeadShape(32, 8, 128)


@pytest.mark.parametrize(
    ("num_keys", "count"), [(0, 1), (1, 1), (128, 1), (129, 2), (512, 4), (513, 3), (1024, 4), (1025, 3), (2000, 4)]
)
def test_keys_are_cut_into_units_and_no_more_splits_than_allowed(num_keys: int, count: int) -> None:
    assert Splits(max_splits=4).count(num_keys) == count


@pytest.mark.parametrize(("num_keys", "count", "most"), [(500, 4, 4), (512, 4, 4), (513, 3, 4), (4096, 16, 16)])
def test_units_of_longer_sequences_are_twice_as_long(num_keys: int, count: int, most: int) -> None:
    splits = Splits(max_splits=32)
    assert (splits.count(num_keys), splits.most(num_keys)) == (count, most)


@pytest.mark.parametrize(("num_kv_heads", "max_splits"), [(1, 64), (4, 64), (8, 32), (32, 8), (128, 4)])
def test_a_single_long_decode_fills_the_device(num_kv_heads: int, max_splits: int) -> None:
    assert splits_for(num_kv_heads, H200_SMS).max_splits == max_splits


@pytest.mark.parametrize(
    ("num_decodes", "max_seq_len", "programs"),
    [(1, 131072, 32), (1, 1024, 4), (1, 1, 1), (64, 131072, 9), (256, 131072, 3)],
)
def test_programs_of_a_decode_are_bounded_by_its_length_and_the_device(
    num_decodes: int, max_seq_len: int, programs: int
) -> None:
    splits = splits_for(LLAMA_8B.num_kv_heads, H200_SMS)
    assert num_split_programs(splits, num_decodes * LLAMA_8B.num_kv_heads, max_seq_len, H200_SMS) == programs


def test_there_is_a_tile_for_each_part_of_each_prefill_chunk_and_none_for_decodes() -> None:
    query_lens = np.array([1, 3, 64, 65, 1], dtype=np.int32)
    assert prefill_tiles(query_lens, 2, 32).tolist() == [[4, 0], [3, 64], [3, 32], [3, 0], [2, 32], [2, 0]]


def test_a_tile_holds_all_rows_of_a_decode_with_drafts() -> None:
    assert decode_tile(LLAMA_8B, 2, max_decode_len=1).num_rows == 16
    assert decode_tile(LLAMA_8B, 2, max_decode_len=4).num_rows == 16
    assert decode_tile(LLAMA_8B, 2, max_decode_len=5).num_rows == 32


@pytest.mark.parametrize(
    ("heads", "itemsize", "max_decode_len", "num_rows", "num_warps", "row_tiles"),
    [
        (HeadShape(64, 8, 128), 2, 6, 64, 4, 1),
        (HeadShape(64, 8, 128), 2, 11, 128, 8, 1),
        (HeadShape(64, 4, 128), 2, 11, 128, 8, 2),
        (HeadShape(16, 1, 256), 2, 6, 32, 8, 3),
        (HeadShape(64, 4, 128), 4, 6, 64, 8, 2),
        (HeadShape(16, 8, 256), 4, 1, 16, 4, 1),
    ],
)
def test_of_many_rows_a_decode_takes_more_warps_then_more_tiles(
    heads: HeadShape, itemsize: int, max_decode_len: int, num_rows: int, num_warps: int, row_tiles: int
) -> None:
    tile = decode_tile(heads, itemsize, max_decode_len)
    assert (tile.num_rows, tile.num_warps) == (num_rows, num_warps)
    assert num_row_tiles(heads, tile, max_decode_len) == row_tiles


def test_a_head_dim_beyond_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 512: the Triton attention kernels go up to 256"):
        prefill_tile(HeadShape(8, 8, 512), 2, 0)


def test_the_workspace_has_an_entry_for_each_token_head_and_split() -> None:
    assert workspace_floats(LLAMA_8B, num_tokens=10, num_sms=H200_SMS) == (10 * 32 * 32 * 128, 10 * 32 * 32 * 2)
