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


def hash_block(
    parent: bytes | None, token_ids: Sequence[int] | NDArray[np.int32], extra_keys: tuple[bytes, ...] = ()
) -> bytes:
    """Digest of one full block.

    SHA-256 over the parent's digest (nothing for the first block), the token ids as little-endian uint32, and each
    extra key preceded by its length as little-endian uint32, cut to `DIGEST_BYTES`.
    """
    tokens = np.asarray(token_ids, dtype=_INT32).tobytes()
    keys = b"".join(len(key).to_bytes(4, "little") + key for key in extra_keys) if extra_keys else b""
    return sha256((parent or b"") + tokens + keys).digest()[:DIGEST_BYTES]
