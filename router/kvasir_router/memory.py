"""What the router may hold, within the memory limit of its container: at the limit the kernel ends it, and every stream
with it.

Parts of the limit are for what grows with the load; the rest, a fourth, is for the program and what bodies take while
they are read.
"""

import dataclasses
import logging
from pathlib import Path

from kvasir_router.config import RouterConfig
from kvasir_router.prefix_index.approximate import PrefixMemory

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_BODIES, _KV_INDEX, _PREFIXES, _TEXTS, _CONNECTIONS, _UNREAD = 5 / 16, 1 / 8, 1 / 16, 1 / 16, 1 / 8, 1 / 16
_KV_BLOCK_BYTES = 200
_CONNECTION_BYTES = 20_000
"""With a stream on it, and the one of the engine: 17 kB were measured."""
TEXT_CACHE_BYTES = 64 * 2**20


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Of cgroup v2, then v1; None: there is none."""
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        if file.is_file() and (text := file.read_text().strip()) != "max":
            return int(text)
    return None


def within_limit(config: RouterConfig, limit_bytes: int | None) -> RouterConfig:
    if limit_bytes is None:
        return config
    held = min(config.max_held_body_size, int(_BODIES * limit_bytes))
    if held < config.max_held_body_size:
        text = "of %d MiB of memory bodies and journals get %d MiB, less than --max-held-body-size"
        logger.info(text, limit_bytes >> 20, held >> 20)
    return dataclasses.replace(
        config,
        max_held_body_size=held,
        max_body_size=min(config.max_body_size, held),
        kv_index_size=min(config.kv_index_size, max(int(_KV_INDEX * limit_bytes) // _KV_BLOCK_BYTES, 1)),
        max_connections=min(config.max_connections, max(int(_CONNECTIONS * limit_bytes) // _CONNECTION_BYTES, 1)),
    )


def prefix_memory(limit_bytes: int | None) -> PrefixMemory:
    return PrefixMemory() if limit_bytes is None else PrefixMemory(min(256 * 2**20, int(_PREFIXES * limit_bytes)))


def text_cache_bytes(limit_bytes: int | None) -> int:
    """Of texts and their tokens."""
    return TEXT_CACHE_BYTES if limit_bytes is None else min(TEXT_CACHE_BYTES, int(_TEXTS * limit_bytes))


def most_unread_bytes(limit_bytes: int | None) -> int | None:
    """Of answers that clients have yet to take."""
    return None if limit_bytes is None else int(_UNREAD * limit_bytes)
