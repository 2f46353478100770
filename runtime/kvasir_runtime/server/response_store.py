"""Responses that clients may ask for again or go on from: kept by all API processes of an engine together, within a
bound of bytes, the oldest dropped first. None outlives the engine.

Each is kept with the whole conversation before it, so that dropping one breaks no other. A tenant sees its own alone.
Of one that is streamed in the background the events are kept too, within the same bound.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

logger = logging.getLogger(__name__)
BUSY_SECONDS = 5.0
"""That one process may wait for another's write, which takes a millisecond."""
INLINE_BYTES = 2**18
"""No more are written while the event loop waits: 1 ms."""
IN_PROGRESS = "in_progress"
T = TypeVar("T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses(
    number INTEGER PRIMARY KEY, tenant TEXT, id TEXT, num_bytes INTEGER, response BLOB, conversation BLOB,
    is_streamed INTEGER DEFAULT 0, UNIQUE (tenant, id)
);
CREATE TABLE IF NOT EXISTS items(number INTEGER, tenant TEXT, id TEXT, item BLOB);
CREATE INDEX IF NOT EXISTS item_ids ON items(tenant, id);
CREATE INDEX IF NOT EXISTS item_numbers ON items(number);
CREATE TABLE IF NOT EXISTS events(number INTEGER, last INTEGER, block BLOB);
CREATE INDEX IF NOT EXISTS event_numbers ON events(number, last);
CREATE TRIGGER IF NOT EXISTS forget AFTER DELETE ON responses BEGIN
    DELETE FROM items WHERE number = OLD.number;
    DELETE FROM events WHERE number = OLD.number;
END;
"""
_UPSERT = """
INSERT INTO responses(tenant, id, num_bytes, response, conversation) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (tenant, id) DO UPDATE SET
    num_bytes = excluded.num_bytes
        + (SELECT coalesce(sum(length(block)), 0) FROM events WHERE number = responses.number),
    response = excluded.response, conversation = excluded.conversation
RETURNING number
"""
_DELETE = "DELETE FROM responses WHERE tenant = ? AND id = ?"
_NUMBER = "SELECT number FROM responses WHERE tenant = ? AND id = ?"
_BEHIND_ALL = 2**62


class Conversation(msgspec.Struct, frozen=True):
    """Items are JSON objects, as they were sent and as they will be."""

    earlier: list[msgspec.Raw]
    """Of the responses that this one goes on from."""
    given: list[msgspec.Raw]
    """The request's own input."""
    made: list[msgspec.Raw]
    """The response's output."""

    @property
    def items(self) -> list[msgspec.Raw]:
        return [*self.earlier, *self.given, *self.made]


class _Told(msgspec.Struct):
    status: str = ""
    background: bool = False


class KeptResponse(msgspec.Struct, frozen=True):
    response: bytes
    conversation: Conversation
    is_streamed: bool
    """Whether its events are kept."""

    @property
    def status(self) -> str:
        return msgspec.json.decode(self.response, type=_Told).status

    @property
    def is_background(self) -> bool:
        return msgspec.json.decode(self.response, type=_Told).background


class _Identified(msgspec.Struct):
    id: str = ""


class ResponseStore:
    """Of one API process, on its event loop and in a thread of its own. What the disk refuses is not kept."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        """`max_bytes` 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "responses")
        self._connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._connection.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; {_SCHEMA}")

    def put(self, tenant: str, response_id: str, response: bytes, conversation: Conversation) -> None:
        """Whatever was kept of it before is replaced. One that alone is more than the bound is not kept."""
        encoded = msgspec.json.encode(conversation)
        num_bytes = len(response) + len(encoded)
        if num_bytes > self._max_bytes:
            if self._max_bytes:
                self._change(_DELETE, tenant, response_id)
            return
        write = partial(self._write, tenant, response_id, num_bytes, response, encoded, conversation.made)
        if num_bytes <= INLINE_BYTES:
            write()
        else:
            self._thread.submit(write)

    async def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        query = "SELECT response, conversation, is_streamed FROM responses WHERE tenant = ? AND id = ?"
        row = await self._in_thread(partial(self._row, query, tenant, response_id), None)
        if row is None:
            return None
        return KeptResponse(row[0], msgspec.json.decode(row[1], type=Conversation), bool(row[2]))

    async def has(self, tenant: str, response_id: str) -> bool:
        return await self._in_thread(partial(self._row, _NUMBER, tenant, response_id), None) is not None

    def begin_events(self, tenant: str, response_id: str) -> None:
        """From now on the response is one that is streamed."""
        self._change("UPDATE responses SET is_streamed = 1 WHERE tenant = ? AND id = ?", tenant, response_id)

    def add_events(self, tenant: str, response_id: str, last: int, block: bytes) -> None:
        """`last`: number of the block's last event. Of a response that is not kept, or not any more, none are."""
        try:
            with self._transaction() as connection:
                if (row := connection.execute(_NUMBER, (tenant, response_id)).fetchone()) is not None:
                    connection.execute("INSERT INTO events VALUES (?, ?, ?)", (row[0], last, block))
                    connection.execute(
                        "UPDATE responses SET num_bytes = num_bytes + ? WHERE number = ?", (len(block), row[0])
                    )
                    self._drop_oldest(connection)
        except sqlite3.Error as error:
            logger.warning("events of response %s cannot be kept: %s", response_id, error)

    def end_events(self, tenant: str, response_id: str) -> None:
        """There will be no more; what was put before is there by then."""
        self._thread.submit(self.add_events, tenant, response_id, _BEHIND_ALL, b"")

    async def events_after(self, tenant: str, response_id: str, number: int) -> list[tuple[int, bytes]] | None:
        """Blocks with events above that number, each with its last event's, in order; an empty block is the end of the
        stream. None: the response is not kept, or not any more."""
        return await self._in_thread(partial(self._events_after, tenant, response_id, number), None)

    async def item(self, tenant: str, item_id: str) -> bytes | None:
        """Of any response's output."""
        query = "SELECT item FROM items WHERE tenant = ? AND id = ?"
        row = await self._in_thread(partial(self._row, query, tenant, item_id), None)
        return None if row is None else row[0]

    async def delete(self, tenant: str, response_id: str) -> bool:
        return await self._in_thread(partial(self._delete, tenant, response_id), False)

    def close(self) -> None:
        self._thread.shutdown()
        with self._lock:
            self._connection.close()

    async def _in_thread(self, ask: Callable[[], T], default: T) -> T:
        """Behind all that was put before."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        except sqlite3.Error as error:
            logger.warning("responses that are kept cannot be read: %s", error)
            return default

    def _write(
        self, tenant: str, response_id: str, num_bytes: int, response: bytes, conversation: bytes,
        made: Sequence[msgspec.Raw],
    ) -> None:  # fmt: skip
        try:
            self._insert(tenant, response_id, num_bytes, response, conversation, made)
        except sqlite3.Error as error:
            logger.warning("response %s cannot be kept: %s", response_id, error)

    def _insert(
        self, tenant: str, response_id: str, num_bytes: int, response: bytes, conversation: bytes,
        made: Sequence[msgspec.Raw],
    ) -> None:  # fmt: skip
        with self._transaction() as connection:
            values = tenant, response_id, num_bytes, response, conversation
            [(number,)] = connection.execute(_UPSERT, values).fetchall()
            connection.execute("DELETE FROM items WHERE number = ?", (number,))
            connection.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?)",
                [(number, tenant, msgspec.json.decode(item, type=_Identified).id, item) for item in made],
            )
            self._drop_oldest(connection)

    def _delete(self, tenant: str, response_id: str) -> bool:
        with self._transaction() as connection:
            deleted = connection.execute(_DELETE, (tenant, response_id))
            return deleted.rowcount > 0

    def _change(self, statement: str, *values: str) -> None:
        try:
            with self._transaction() as connection:
                connection.execute(statement, values)
        except sqlite3.Error as error:
            logger.warning("what is kept of responses cannot be changed: %s", error)

    def _events_after(self, tenant: str, response_id: str, number: int) -> list[tuple[int, bytes]] | None:
        if (row := self._row(_NUMBER, tenant, response_id)) is None:
            return None
        query = "SELECT last, block FROM events WHERE number = ? AND last > ? ORDER BY last"
        with self._lock:
            return self._connection.execute(query, (row[0], number)).fetchall()

    def _drop_oldest(self, connection: sqlite3.Connection) -> None:
        (num_bytes,) = connection.execute("SELECT total(num_bytes) FROM responses").fetchone()
        while num_bytes > self._max_bytes:
            oldest = connection.execute("SELECT number, num_bytes FROM responses ORDER BY number LIMIT 1").fetchone()
            connection.execute("DELETE FROM responses WHERE number = ?", oldest[:1])
            num_bytes -= oldest[1]

    def _row(self, query: str, *values: str) -> Sequence[Any] | None:
        with self._lock:
            return self._connection.execute(query, values).fetchone()  # type: ignore[no-any-return]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
