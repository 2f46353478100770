"""The router's own name of a block: 64 bits over its tokens, chained to all blocks before it.

Engines call the same block differently (their hash functions and seeds are their own), so their events' tokens are
hashed again here, and a prompt's tokens in the same way.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

_TOKEN_BYTES = 4


def root_key(adapter: bytes) -> int:
    """What the first block is chained to: an adapter's KV is its own."""
    return xxh3_64_intdigest(adapter)


def block_keys(
    parent: int, tokens: bytes, block_size: int, extra_keys: Sequence[bytes] | None = None
) -> tuple[int, ...]:
    """One key for each full block of `tokens` (uint32, little-endian); `extra_keys` has one entry for each block."""
    block_bytes = block_size * _TOKEN_BYTES
    view = memoryview(tokens)
    keys = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = xxh3_64_intdigest(view[start : start + block_bytes], seed=parent)
        if extra_keys is not None and (extra := extra_keys[start // block_bytes]):
            parent = xxh3_64_intdigest(extra, seed=parent)
        keys.append(parent)
    return tuple(keys)


def prompt_keys(tokens: bytes, block_size: int, adapter: bytes, first_extra_key: bytes = b"") -> tuple[int, ...]:
    """The keys of a whole prompt; engines hash a cache salt into the first block only."""
    root = root_key(adapter)
    if not first_extra_key:
        return block_keys(root, tokens, block_size)
    block_bytes = block_size * _TOKEN_BYTES
    first = block_keys(root, tokens[:block_bytes], block_size, (first_extra_key,))
    return first + block_keys(first[0], tokens[block_bytes:], block_size) if first else ()
