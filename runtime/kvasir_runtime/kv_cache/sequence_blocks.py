"""The blocks that one sequence holds, a table for each KV group, and the hashes of its full blocks as far as known.

All tables count blocks alike: entry i of every table holds tokens [i * block_size, (i + 1) * block_size). An entry is
None where its block lies behind what the group's tokens see.

A full block's identity is a hash chained over everything before it. The rule is shared with routers and KV-event
readers (DESIGN.md section 3), so it is bytes in, bytes out, and nothing of Python's own hashing. Equal digests mean
equal tokens at equal positions under equal extra keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.block_pool import Block

Tokens = Sequence[int] | NDArray[np.int32]
DIGEST_BYTES = 16
_INT32 = np.dtype("<i4")  # token ids are not negative, so signed and unsigned are the same bytes


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    block_size: int
    tables: tuple[list[Block | None], ...]
    num_passed: list[int]
    """Of each group: entries at the beginning that are behind what is seen."""
    extra_keys: tuple[bytes, ...] = ()
    """Part of the first block's hash: prefixes are shared only under equal keys."""
    num_offered: int = 0
    """Blocks that were offered to the prefix cache."""
    hashes: list[bytes] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.tables[0]) * self.block_size

    @property
    def next_boundary(self) -> int:
        """Tokens at which the next block to offer is full."""
        return (self.num_offered + 1) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Entries to add to each table before `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.tables[0]))

    def take_all(self) -> list[Block]:
        """Give up every block; the hashes stay, since the tokens do."""
        blocks = [block for table in self.tables for block in table if block is not None]
        for table in self.tables:
            table.clear()
        self.num_offered = 0
        self.num_passed[:] = [0] * len(self.num_passed)
        return blocks

    def hash_of(self, token_ids: Tokens, index: int) -> bytes:
        """Hash of block `index`, whose tokens must all be known. Computed once, in order."""
        hashes, size = self.hashes, self.block_size
        if (first := len(hashes)) <= index:
            parent, extra_keys = (hashes[-1], ()) if hashes else (None, self.extra_keys)
            hashes += hash_blocks(parent, token_ids[first * size : (index + 1) * size], size, extra_keys)
        return hashes[index]


def hash_blocks(
    parent: bytes | None, token_ids: Tokens, block_size: int, extra_keys: tuple[bytes, ...] = ()
) -> list[bytes]:
    """Digests of full blocks in a row, of which the first comes after `parent` and has the extra keys.

    SHA-256 over the digest before it (nothing for a prompt's first block), the token ids as little-endian uint32, and
    each extra key preceded by its length as little-endian uint32, cut to `DIGEST_BYTES`.
    """
    tokens = np.asarray(token_ids, dtype=_INT32).tobytes()  # one array: one for each block costs more than its hash
    keys = b"".join([len(key).to_bytes(4, "little") + key for key in extra_keys]) if extra_keys else b""
    block_bytes = block_size * _INT32.itemsize
    if len(tokens) == block_bytes:  # all that a running sequence asks for
        return [sha256((parent or b"") + tokens + keys).digest()[:DIGEST_BYTES]]
    digest, digests = parent or b"", []
    for first in range(0, len(tokens), block_bytes):
        digest = sha256(digest + tokens[first : first + block_bytes] + keys).digest()[:DIGEST_BYTES]
        digests.append(digest)
        keys = b""
    return digests
