"""KV groups of one spec each, by what their tokens see."""

from collections.abc import Iterable

from kvasir_runtime.kv_cache.spec import FULL, KvGroup, Reach

Seen = Reach | int | None
"""A number is a window, None everything."""


def groups_of(seen: Iterable[Seen]) -> tuple[KvGroup, ...]:
    return tuple(KvGroup((index,), reach_of(some)) for index, some in enumerate(seen))


def reach_of(seen: Seen) -> Reach:
    return Reach.window(seen) if isinstance(seen, int) else FULL if seen is None else seen
