"""Which engine core a request goes to, where there are several: the one that will be done with its prompt first.

Each API process decides by itself, from what the cores said last and what it has sent since.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvasir_runtime.engine.core_client import CoreClient

CHUNK_TOKENS = 128
"""Prompts that begin alike are told apart in steps of so many tokens."""
MAX_CHUNKS = 1 << 16
"""Remembered; those not used for longest are forgotten first."""
DECODE_TOKENS = 16
"""A sequence in flight takes from a newcomer about as much as so many prompt tokens do."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    core: int
    """Its index."""
    prefill_tokens: int
    """Of the prompt, that the core will probably have to compute."""


class PrefixAffinity:
    """Which core was sent a beginning last, and so has it cached unless it ran out of blocks since."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._core_of: OrderedDict[bytes, int] = OrderedDict()

    def match(self, chunks: Sequence[bytes]) -> Mapping[int, int]:
        """Core -> tokens of the longest beginning that it was sent last."""
        found: dict[int, int] = {}
        for index, chunk in enumerate(chunks):
            core = self._core_of.get(chunk)
            if core is None:
                break
            self._core_of.move_to_end(chunk)
            found[core] = (index + 1) * CHUNK_TOKENS
        return found

    def insert(self, chunks: Sequence[bytes], core: int) -> None:
        for chunk in chunks:
            self._core_of[chunk] = core
            self._core_of.move_to_end(chunk)
        while len(self._core_of) > self._max_chunks:
            self._core_of.popitem(last=False)


class Dispatcher:
    def __init__(self, cores: Sequence[CoreClient]) -> None:
        self._cores = cores
        self._affinity = PrefixAffinity()

    def choose(self, token_ids: Sequence[int], cache_salt: str | None) -> Dispatch:
        if len(self._cores) == 1:
            return Dispatch(0, len(token_ids))
        chunks = list(prefix_chunks(token_ids, cache_salt))
        cached = self._affinity.match(chunks)
        uncached = [len(token_ids) - cached.get(index, 0) for index in range(len(self._cores))]
        chosen = min(range(len(self._cores)), key=lambda index: _tokens_ahead(self._cores[index]) + uncached[index])
        self._affinity.insert(chunks, chosen)
        return Dispatch(chosen, uncached[chosen])


def _tokens_ahead(core: CoreClient) -> int:
    """What the core has to do first. It counts what this process sent once it has heard of it, so the larger holds."""
    stats = core.stats
    tokens = 0 if stats is None else stats.waiting_uncached_tokens + stats.running_uncached_tokens
    num_running = 0 if stats is None else stats.num_running
    return max(tokens, core.prefill_tokens) + DECODE_TOKENS * max(num_running, len(core.requests))


def prefix_chunks(token_ids: Sequence[int], cache_salt: str | None) -> Iterator[bytes]:
    """A chained digest of each full chunk; requests of another salt share none."""
    tokens = np.asarray(token_ids, dtype=np.uint32)
    digest = (cache_salt or "").encode()
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS].tobytes()
        digest = blake2b(chunk, digest_size=16, key=blake2b(digest, digest_size=16).digest()).digest()
        yield digest
