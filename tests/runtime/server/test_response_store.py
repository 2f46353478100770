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
