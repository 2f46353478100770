"""An engine's KV-cache events, read from vLLM's messages: msgpack, batches of what was stored, removed and cleared.

vLLM has written an event as an array that begins with its name and, later, as a map with its name under "type"; fields
were only ever added at the end. Both are read: a missing field has its default, an event that is unknown or makes no
sense is skipped and counted. Nothing here keeps state or knows a socket.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Digest = bytes | int
"""What the engine calls a block; an older vLLM has numbers, and two engines may call the same block differently."""

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "remaining_copy_counts"),
    "AllBlocksCleared": (),
}
_DEVICE_MEDIA = frozenset({None, "", "GPU"})  # blocks in lower tiers have to be brought back first: not cached here


class MalformedEventsError(Exception):
    """A payload that is no batch of events at all; its publisher is none."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow one another, the first of them after `parent`; None: they begin a prompt."""

    digests: Sequence[Digest]
    parent: Digest | None
    tokens: bytes  # of all of them, uint32 little-endian
    block_size: int  # in tokens
    adapter: bytes = b""
    extra_keys: tuple[bytes, ...] | None = None  # one a block, see `extra_key`; None: no block has any
    group: int | None = None  # of KV layers
    is_window: bool = False  # that group's layers see the last tokens only


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    digests: Sequence[Digest]
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    sent: float  # seconds of the engine's wall clock
    events: tuple[Event, ...]
    rank: int | None  # of the data-parallel engine that it is about
    num_skipped: int  # unknown, unreadable, or about another tier than the device's memory


def decode_events(payload: bytes) -> EventBatch:
    """Raises MalformedEventsError when the payload is not a batch."""
    try:
        sent, raw_events, rank = _batch_fields(msgspec.msgpack.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError, LookupError) as error:
        raise MalformedEventsError(
            f"{len(payload)} bytes are no batch of KV events, [timestamp, events, rank] in msgpack: {error}"
        ) from error
    events = [event for event in map(_event, raw_events) if event is not None]
    return EventBatch(sent, tuple(events), rank, len(raw_events) - len(events))


def extra_key(keys: Sequence[Any]) -> bytes:
    """What besides its tokens makes a block its own (cache salt, images), as bytes; text and its bytes are the same."""
    return msgspec.msgpack.encode([key.encode() if isinstance(key, str) else key for key in keys]) if keys else b""


def _batch_fields(batch: Any) -> tuple[float, list[Any], int | None]:
    if isinstance(batch, dict):
        batch = [batch["ts"], batch["events"], batch.get("data_parallel_rank")]
    sent, events = batch[0], batch[1]
    rank = batch[2] if len(batch) > 2 else None
    if not isinstance(events, list) or not isinstance(rank, int | None):
        raise ValueError("its events are no array, or its rank is no number")
    return float(sent), events, rank


def _event(raw: Any) -> Event | None:
    try:
        name, fields = _named_fields(raw)
        if fields.get("medium") not in _DEVICE_MEDIA:
            return None
        if name == "BlockStored":
            return _stored(fields)
        if name == "BlockRemoved":
            return BlockRemoved(_removed_digests(fields), fields.get("group_idx"))
        return AllBlocksCleared() if name == "AllBlocksCleared" else None
    except (TypeError, ValueError, LookupError, OverflowError, AttributeError):
        return None


def _named_fields(raw: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, dict):
        return raw["type"], raw
    return raw[0], dict(zip(_FIELDS[raw[0]], raw[1:], strict=False))


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    """Raises ValueError, TypeError, LookupError or OverflowError for values that no engine would send."""
    digests, parent, block_size = fields["block_hashes"], fields.get("parent_block_hash"), fields["block_size"]
    _check_digests(digests if parent is None else [*digests, parent])
    tokens = array("I", fields["token_ids"])
    if not isinstance(block_size, int) or block_size <= 0 or len(tokens) != len(digests) * block_size:
        raise ValueError(f"{len(tokens)} tokens do not fill {len(digests)} blocks of {block_size}")
    adapter = fields.get("lora_name")
    if adapter is None:
        adapter = fields.get("lora_id")  # an older vLLM tells its number only, which no request names
    return BlockStored(
        digests=digests,
        parent=parent,
        tokens=tokens.tobytes(),
        block_size=block_size,
        adapter=b"" if adapter is None else str(adapter).encode(),
        extra_keys=_extra_keys(fields.get("extra_keys"), adapter, len(digests)),
        group=fields.get("group_idx"),
        is_window=fields.get("kv_cache_spec_sliding_window") is not None,
    )


def _extra_keys(entries: Any, adapter: Any, num_blocks: int) -> tuple[bytes, ...] | None:
    """The adapter's name, which vLLM puts before the others, counts once: where the chain begins."""
    if not entries or not any(entries):
        return None
    if len(entries) != num_blocks:
        raise ValueError(f"{len(entries)} entries of extra keys for {num_blocks} blocks")
    return tuple(extra_key(_without_adapter(entry or (), adapter)) for entry in entries)


def _without_adapter(keys: Sequence[Any], adapter: Any) -> Sequence[Any]:
    return keys[1:] if keys and adapter is not None and keys[0] == adapter else keys


def _removed_digests(fields: Mapping[str, Any]) -> list[Digest]:
    """vLLM may hold one block twice: as long as a copy remains, the block is cached."""
    digests: list[Digest] = fields["block_hashes"]
    copies = fields.get("remaining_copy_counts")
    _check_digests(digests)
    if copies is None:
        return digests
    return [digest for digest, num_left in zip(digests, copies, strict=True) if not num_left]


def _check_digests(digests: Any) -> None:
    if not isinstance(digests, list) or not {bytes, int}.issuperset(map(type, digests)):
        raise ValueError("a block's hash is neither bytes nor a number")
