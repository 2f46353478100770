"""What is kept of responses, by several processes of one engine."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvasir_runtime.server.response_store import INLINE_BYTES, Conversation, ResponseStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    store = ResponseStore(tmp_path / "responses", 2**20)
    yield store
    store.close()


def conversation(text: str, item_id: str = "i") -> Conversation:
    given, made = ({"type": "message", "content": text}, {"type": "message", "id": item_id})
    return Conversation([], [raw(given)], [raw(made)])


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


async def test_other_processes_find_it(store: ResponseStore, tmp_path: Path) -> None:
    other = ResponseStore(tmp_path / "responses", 2**20)
    store.put("blue", "r", b"{}", conversation("hi"))
    kept = await other.get("blue", "r")
    assert kept is not None
    assert (kept.response, [bytes(item) for item in kept.conversation.items]) == (
        b"{}",
        [b'{"type":"message","content":"hi"}', b'{"type":"message","id":"i"}'],
    )
    assert await other.delete("blue", "r")
    assert await store.get("blue", "r") is None
    other.close()


async def test_items_go_with_their_response(store: ResponseStore) -> None:
    store.put("blue", "r", b"{}", conversation("hi"))
    assert await store.item("blue", "i") == b'{"type":"message","id":"i"}'
    assert await store.item("red", "i") is None
    await store.delete("blue", "r")
    assert await store.item("blue", "i") is None


async def test_a_long_conversation_can_be_got_at_once(store: ResponseStore) -> None:
    store.put("", "r", b"{}", conversation("x" * 2 * INLINE_BYTES))
    assert await store.get("", "r") is not None


async def test_what_alone_is_too_long_drops_nothing_else(store: ResponseStore) -> None:
    store.put("", "short", b"{}", conversation("hi"))
    store.put("", "long", b"{}", conversation("x" * 2**20))
    assert await store.get("", "long") is None
    assert await store.get("", "short") is not None


async def test_what_outgrows_the_bound_is_forgotten(store: ResponseStore) -> None:
    store.put("", "r", b"{}", conversation("hi"))
    store.put("", "r", b"x" * 2**21, conversation("hi"))
    assert await store.get("", "r") is None


async def test_events_are_kept_as_long_as_their_response(store: ResponseStore, tmp_path: Path) -> None:
    other = ResponseStore(tmp_path / "responses", 2**20)
    store.add_events("", "r", 0, b"none is kept")
    store.put("", "r", b"{}", conversation("hi"))
    store.begin_events("", "r")
    store.add_events("", "r", 1, b"a")
    store.add_events("", "r", 4, b"b")
    assert await other.events_after("", "r", 0) == [(1, b"a"), (4, b"b")]
    assert await other.events_after("", "r", 1) == [(4, b"b")]
    store.put("", "r", b"{...}", conversation("x" * 2 * INLINE_BYTES, "later"))
    store.end_events("", "r")
    kept = await store.get("", "r")
    assert kept is not None
    assert (kept.response, kept.is_streamed, await store.item("", "i")) == (b"{...}", True, None)
    blocks = await other.events_after("", "r", 4)
    assert blocks is not None
    assert [block for _, block in blocks] == [b""]
    await store.delete("", "r")
    assert await other.events_after("", "r", 0) is None
    other.close()


async def test_events_take_room_of_their_response(store: ResponseStore) -> None:
    for name in ("old", "new"):
        store.put("", name, b"{}", conversation("hi"))
    store.add_events("", "new", 0, b"x" * 2**19)
    store.put("", "new", b"{}", conversation("hi"))
    assert await store.get("", "old") is not None
    store.add_events("", "new", 1, b"x" * (2**19 - 150))
    assert await store.get("", "old") is None
    assert await store.get("", "new") is not None


async def test_nothing_is_kept_without_room(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "none", 0)
    store.put("", "r", b"{}", conversation("hi"))
    assert await store.get("", "r") is None
    store.close()


async def test_a_disk_that_fails_costs_only_what_was_to_be_kept(
    store: ResponseStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(tmp_path / "responses") as connection:
        connection.execute("DROP TABLE responses")
    store.put("", "r", b"{}", conversation("hi"))
    assert await store.get("", "r") is None
    assert not await store.delete("", "r")
    assert "cannot be kept" in caplog.text
