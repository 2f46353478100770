"""The identity of a full block: a hash chained over everything before it.

The rule is shared with routers and KV-event readers (DESIGN.md section 3), so it is bytes in, bytes out, and nothing of
Python's own hashing. Equal digests mean equal tokens at equal positions under equal extra keys.
"""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
_INT32 = np.dtype("<i4")  # token ids are not negative, so signed and unsigned are the same bytes


def hash_blocks(
    parent: bytes | None,
    token_ids: Sequence[int] | NDArray[np.int32],
    block_size: int,
    extra_keys: tuple[bytes, ...] = (),
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
