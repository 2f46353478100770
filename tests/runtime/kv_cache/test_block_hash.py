"""The block hash is a rule between programs, so its bytes are pinned."""

import hashlib
import struct

import numpy as np
import pytest

from kvasir_runtime.kv_cache.blocks import hash_blocks


def hash_block(parent, token_ids, extra_keys=()):
    (digest,) = hash_blocks(parent, token_ids, len(token_ids), extra_keys)
    return digest


def test_first_block_is_sha256_of_its_little_endian_tokens_cut_to_16_bytes():
    assert hash_block(None, [1, 2, 70000]) == hashlib.sha256(struct.pack("<3I", 1, 2, 70000)).digest()[:16]


def test_parent_digest_comes_before_the_tokens():
    parent = hash_block(None, [1, 2])
    assert hash_block(parent, [3]) == hashlib.sha256(parent + struct.pack("<I", 3)).digest()[:16]


def test_extra_keys_are_length_prefixed_so_they_cannot_run_into_each_other():
    tokens = struct.pack("<I", 7)
    expected = hashlib.sha256(tokens + struct.pack("<I", 2) + b"ab" + struct.pack("<I", 1) + b"c").digest()[:16]
    assert hash_block(None, [7], (b"ab", b"c")) == expected
    assert hash_block(None, [7], (b"a", b"bc")) != expected


def test_no_parent_and_no_keys_add_no_bytes():
    assert hash_block(None, [7]) == hash_block(b"", [7], ())


def test_an_empty_key_is_not_no_key():
    assert hash_block(None, [7], (b"",)) != hash_block(None, [7])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4"])
def test_the_bytes_do_not_depend_on_how_the_tokens_are_held(dtype):
    assert hash_block(None, np.array([1, 2, 70000], dtype=dtype)) == hash_block(None, [1, 2, 70000])


def test_blocks_in_a_row_are_chained_and_the_first_alone_has_the_keys():
    first = hash_block(b"p", [1, 2], (b"k",))
    second = hash_block(first, [3, 4])
    assert hash_blocks(b"p", [1, 2, 3, 4, 5, 6], 2, (b"k",)) == [first, second, hash_block(second, [5, 6])]


def test_no_tokens_are_no_blocks():
    assert hash_blocks(b"p", [], 2, (b"k",)) == []


def test_order_counts():
    assert hash_block(None, [1, 2]) != hash_block(None, [2, 1])
