"""The identity of a full block: a hash chained over everything before it.

The rule is shared with routers and KV-event readers (DESIGN.md section 3), so it is bytes in, bytes out, and nothing of
Python's own hashing. Equal digests mean equal tokens at equal positions under equal extra keys.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from sys import byteorder

DIGEST_BYTES = 16


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: tuple[bytes, ...] = ()) -> bytes:
    """Digest of one full block.

    SHA-256 over the parent's digest (nothing for the first block), the token ids as little-endian uint32, and each
    extra key preceded by its length as little-endian uint32, cut to `DIGEST_BYTES`.
    """
    tokens = array("I", token_ids)
    if byteorder == "big":
        tokens.byteswap()
    digest = sha256(parent or b"")
    digest.update(tokens.tobytes())
    for key in extra_keys:
        digest.update(len(key).to_bytes(4, "little"))
        digest.update(key)
    return digest.digest()[:DIGEST_BYTES]
