"""Events as several versions of vLLM have written them, and what is no event."""

from array import array
from typing import Any

import msgspec
import pytest

from kvasir_router.prefix_index.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MalformedEventsError,
    decode_events,
    extra_key,
)

A, B, PARENT = b"a" * 16, b"b" * 16, b"p" * 16
TOKENS = [1, 2, 3, 4]
TOKEN_BYTES = array("I", TOKENS).tobytes()


def batch(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), rank])


def stored(**changes: Any) -> dict[str, Any]:
    fields = {
        "type": "BlockStored",
        "block_hashes": [A, B],
        "parent_block_hash": PARENT,
        "token_ids": TOKENS,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return fields | changes


def only_event(event: Any) -> Any:
    decoded = decode_events(batch(event))
    return decoded.events[0] if decoded.events else None


def test_arrays_tagged_by_their_first_element_are_read() -> None:
    event = only_event(["BlockStored", [A, B], PARENT, TOKENS, 2, None, "GPU", None, [["salt"], None]])
    assert event == BlockStored([A, B], PARENT, TOKEN_BYTES, 2, extra_keys=(extra_key(["salt"]), b""))


def test_maps_tagged_by_type_are_read_alike() -> None:
    assert only_event(stored()) == only_event(["BlockStored", [A, B], PARENT, TOKENS, 2, None, "GPU"])


def test_a_batch_may_be_a_map() -> None:
    payload = msgspec.msgpack.encode({"ts": 1.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 3})
    assert decode_events(payload).rank == 3


def test_a_batch_without_rank_is_read() -> None:
    decoded = decode_events(msgspec.msgpack.encode([12.5, [["AllBlocksCleared"]]]))
    assert (decoded.sent, decoded.events, decoded.rank) == (12.5, (AllBlocksCleared(),), None)


def test_hashes_may_be_numbers_and_trailing_fields_missing() -> None:
    event = only_event(["BlockStored", [-7, 2**63], None, TOKENS, 2])
    assert event == BlockStored([-7, 2**63], None, TOKEN_BYTES, 2)


def test_fields_that_came_later_are_ignored() -> None:
    event = only_event(["BlockRemoved", [A], "GPU", 0, None, "a field of next year"])
    assert event == BlockRemoved([A], 0)


def test_a_block_with_a_copy_left_is_not_removed() -> None:
    assert only_event(["BlockRemoved", [A, B], "GPU", None, [1, 0]]) == BlockRemoved([B])


@pytest.mark.parametrize("medium", ["CPU", "DISK", "CPU_PINNED"])
def test_blocks_in_lower_tiers_are_not_the_devices(medium: str) -> None:
    decoded = decode_events(batch(stored(medium=medium), ["BlockRemoved", [A], medium]))
    assert (decoded.events, decoded.num_skipped) == ((), 2)


def test_an_adapters_name_counts_once() -> None:
    event = only_event(stored(lora_name="french", extra_keys=[["french", "salt"], ["french"]]))
    assert (event.adapter, event.extra_keys) == (b"french", (extra_key(["salt"]), b""))


def test_an_adapter_known_by_number_only_is_not_the_base_model() -> None:
    assert only_event(["BlockStored", [A, B], None, TOKENS, 2, 7]).adapter == b"7"


def test_text_and_its_bytes_are_the_same_extra_key() -> None:
    assert extra_key(["salt"]) == extra_key([b"salt"]) != extra_key(["other"])


def test_groups_and_windows_are_told() -> None:
    event = only_event(stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128))
    assert (event.group, event.is_window) == (1, True)


@pytest.mark.parametrize(
    "event",
    [
        ["BlockMoved", [A]],
        ["BlockStored", [A, B], None, [1, 2, 3], 2],  # tokens do not fill the blocks
        ["BlockStored", [A], None, [1, -2], 2],
        ["BlockStored", [A], None, [1, 2**32], 2],
        ["BlockStored", [A], None, [[1, 2], [3, 4]], 2],
        ["BlockStored", [A], None, [], 0],
        ["BlockStored", [A], [A], [1, 2], 2],
        ["BlockStored", [[A]], None, [1, 2], 2],
        ["BlockStored", [A], None, [1, 2], 2.0],
        ["BlockStored", [A], None, [1, 2], 2, None, "GPU", None, [["x"], ["y"]]],
        ["BlockStored"],
        ["BlockRemoved", A],
        ["BlockRemoved", [{}]],
        ["BlockRemoved", [A], "GPU", None, [1, 2]],
        ["BlockRemoved", [A], []],
        [],
        [[]],
        {"block_hashes": [A]},
        7,
    ],
)
def test_what_makes_no_sense_is_skipped_and_the_rest_is_read(event: Any) -> None:
    decoded = decode_events(batch(event, ["BlockRemoved", [B]]))
    assert (decoded.events, decoded.num_skipped) == ((BlockRemoved([B]),), 1)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"text", *map(msgspec.msgpack.encode, (7, [], [1.0], [1.0, 7], ["x", []], [1.0, [], "x"], {}))],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedEventsError, match="no batch of KV events"):
        decode_events(payload)
