"""Tables of one sequence: what fits, what is missing, and the hashes of full blocks."""

import numpy as np
import pytest

from kvasir_runtime.kv_cache.blocks import Block, SequenceBlocks, hash_blocks

TOKENS = list(range(100, 112))


def make_blocks(num_blocks: int = 0, extra_keys: tuple[bytes, ...] = ()) -> SequenceBlocks:
    """Two tables of blocks of 4 tokens."""
    tables = tuple([Block(10 * group + index) for index in range(num_blocks)] for group in range(2))
    return SequenceBlocks(4, tables, [0, 0], extra_keys)


@pytest.mark.parametrize(
    ("num_tokens", "missing"), [(0, 0), (1, 0), (8, 0), (9, 1), (12, 1), (13, 2)], ids=lambda value: str(value)
)
def test_missing_blocks_are_those_beyond_what_fits(num_tokens, missing):
    blocks = make_blocks(2)
    assert blocks.capacity == 8
    assert blocks.num_missing(num_tokens) == missing


@pytest.mark.parametrize(("num_offered", "boundary"), [(0, 4), (1, 8), (2, 12)])
def test_the_next_boundary_is_where_the_next_block_to_offer_is_full(num_offered, boundary):
    blocks = make_blocks(3)
    blocks.num_offered = num_offered
    assert blocks.next_boundary == boundary


def test_giving_up_all_blocks_leaves_empty_tables_and_the_hashes():
    blocks = make_blocks(2)
    blocks.hash_of(TOKENS, 1)
    hashes = list(blocks.hashes)
    blocks.tables[1][0] = None
    blocks.num_offered, blocks.num_passed[:] = 2, [0, 1]
    assert [block.block_id for block in blocks.take_all()] == [0, 1, 11]
    assert (blocks.tables, blocks.num_offered, blocks.num_passed) == (([], []), 0, [0, 0])
    assert blocks.hashes == hashes


def test_a_blocks_hash_is_chained_over_all_before_it():
    blocks = make_blocks()
    first, second, third = hash_blocks(None, TOKENS, 4)
    assert blocks.hash_of(TOKENS, 0) == first
    assert blocks.hash_of(TOKENS, 2) == third
    assert blocks.hashes == [first, second, third]
    assert blocks.hash_of(TOKENS, 1) == second


def test_extra_keys_are_in_the_first_blocks_hash_alone():
    blocks = make_blocks(extra_keys=(b"salt",))
    first, second = hash_blocks(None, TOKENS[:8], 4, (b"salt",))
    assert [blocks.hash_of(TOKENS, 0), blocks.hash_of(TOKENS, 1)] == [first, second]


def test_a_hash_is_computed_once_since_known_tokens_never_change():
    blocks = make_blocks()
    before = blocks.hash_of(TOKENS, 1)
    assert blocks.hash_of([0] * 12, 1) == before


def test_tokens_of_an_array_hash_like_those_of_a_list():
    assert make_blocks().hash_of(np.array(TOKENS, dtype=np.int32), 2) == make_blocks().hash_of(TOKENS, 2)
