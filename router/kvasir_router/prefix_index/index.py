"""The seam to whoever knows which endpoint has cached what: `key` once a request, `match` at each pick.

How prompts are cut and hashed is each index's own. Times are seconds of any steady clock, given by the caller.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from kvasir_router.dialects.dialect import Prompt

Cached = Mapping[str, int]
"""Endpoint url -> leading tokens of a prompt that it has cached, where any."""


class Held(NamedTuple):
    """Leading tokens of a prompt that an endpoint has cached."""

    num_tokens: int
    rank: int = 0  # the data-parallel one that has them


class PrefixKey(Protocol):
    """A prompt as its index knows it; opaque to everybody else."""

    @property
    def num_tokens(self) -> int:
        """Exact where the index tokenises, else estimated."""
        ...


class SharedPrefix(msgspec.Struct, frozen=True):
    """A key that tells which prompts have a beginning in common."""

    def beginning(self, num_tokens: int) -> int | None:
        """The name of so many leading tokens, as they were matched; None: too few."""
        raise NotImplementedError


class PrefixIndex(Protocol):
    async def key(self, prompt: Prompt) -> PrefixKey:
        """Hashes, and tokenises where it does; large prompts off the event loop."""
        ...

    def match(self, key: PrefixKey, now: float) -> Mapping[str, int]:
        """Endpoint url -> leading tokens of the prompt that it has cached; only those above 0."""
        ...

    def written(self, key: PrefixKey) -> Mapping[str, Held]:
        """The same by the endpoints' own word alone: what has been sent there since is not taken for cached."""
        ...

    def insert(self, url: str, key: PrefixKey, now: float, capacity_tokens: int | None) -> None:
        """The prompt was sent there, and is expected to be cached; `capacity_tokens` is what its KV cache holds."""
        ...

    def withdraw(self, url: str, key: PrefixKey | None = None) -> None:
        """That dispatch has failed. Without a key: the endpoint has failed, restarted or is gone, its cache with it."""
        ...

    def expire(self, now: float) -> None:
        """Frees the memory of what is too old to be believed; called now and then."""
        ...

    def num_blocks(self, url: str) -> int:
        """Believed to be cached there."""
        ...
