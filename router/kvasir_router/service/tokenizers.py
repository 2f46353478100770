"""The tokenizers that this process has loaded: one object for all services whose engines have the same.

A tokenizer lives as long as a service uses it. It is known by its content: an engine's word for it, the digest, could
be that of another service's.
"""

import asyncio
import hashlib
from weakref import WeakValueDictionary

import msgspec

from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer, TokenizerCard

CACHE_BYTES = 64 * 2**20
"""Of texts and their tokens, of all tokenizers together."""


class Tokenizers:
    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._pieces = PieceCache(cache_bytes)
        self._known: WeakValueDictionary[bytes, PromptTokenizer] = WeakValueDictionary()
        self._loading = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._known)

    async def of(self, card: TokenizerCard) -> PromptTokenizer:
        """Loaded in a thread, one at a time. Raises UnusableTokenizerError."""
        async with self._loading:
            content = await asyncio.to_thread(_digest, card)
            tokenizer = self._known.get(content)
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(PromptTokenizer, card, self._pieces)
                self._known[content] = tokenizer
            return tokenizer


def _digest(card: TokenizerCard) -> bytes:
    return hashlib.sha256(msgspec.json.encode(card, order="sorted")).digest()
