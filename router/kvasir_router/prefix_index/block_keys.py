"""The router's own name of a block: 64 bits over its tokens, chained to all blocks before it.

Engines call the same block differently (their hash functions and seeds are their own), so their events' tokens are
hashed again here, and a prompt's tokens in the same way.
"""

from collections.abc import Iterator, Sequence
from struct import iter_unpack

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


def root_key(adapter: bytes) -> int:
    """What the first block is chained to: an adapter's KV is its own."""
    return xxh3_64_intdigest(adapter)


def block_keys(
    parent: int, tokens: bytes, block_size: int, extra_keys: Sequence[bytes] | None = None
) -> tuple[int, ...]:
    """One key for each full block of `tokens` (uint32, little-endian); `extra_keys` has one entry for each block."""
    if extra_keys is None:
        return chained_hashes(parent, tokens, block_size * TOKEN_BYTES)
    keys: list[int] = []
    for block, extra in zip(_blocks(tokens, block_size * TOKEN_BYTES), extra_keys, strict=False):
        parent = xxh3_64_intdigest(block, parent)
        if extra:
            parent = xxh3_64_intdigest(extra, parent)
        keys.append(parent)
    return tuple(keys)


def chained_hashes(parent: int, content: bytes, block_bytes: int) -> tuple[int, ...]:
    """One of 64 bits for each full block, over it and all before it."""
    hashes = []
    for block in _blocks(content, block_bytes):
        parent = xxh3_64_intdigest(block, parent)
        hashes.append(parent)
    return tuple(hashes)


def _blocks(content: bytes, block_bytes: int) -> Iterator[bytes]:
    whole = memoryview(content)[: len(content) // block_bytes * block_bytes]
    return (block for (block,) in iter_unpack(f"{block_bytes}s", whole))


class PromptKeys:
    """The keys of a prompt, whose tokens come piece by piece; engines hash a cache salt into the first block only."""

    def __init__(self, block_size: int, adapter: bytes, first_extra_key: bytes = b"") -> None:
        self.keys: list[int] = []
        self.block_size = block_size
        self._root = root_key(adapter)
        self._first_extra_key = first_extra_key
        self._rest = b""  # tokens of a block that is not full

    def extend(self, tokens: bytes) -> None:
        tokens, block_bytes = self._rest + tokens, self.block_size * TOKEN_BYTES
        if self._first_extra_key and not self.keys:
            self.keys.extend(block_keys(self._root, tokens[:block_bytes], self.block_size, (self._first_extra_key,)))
            if not self.keys:
                self._rest = tokens
                return
            tokens = tokens[block_bytes:]
        self.keys.extend(block_keys(self.keys[-1] if self.keys else self._root, tokens, self.block_size))
        self._rest = tokens[len(tokens) - len(tokens) % block_bytes :]


def prompt_keys(tokens: bytes, block_size: int, adapter: bytes, first_extra_key: bytes = b"") -> tuple[int, ...]:
    """Of a prompt that is there as a whole."""
    prompt = PromptKeys(block_size, adapter, first_extra_key)
    prompt.extend(tokens)
    return tuple(prompt.keys)
