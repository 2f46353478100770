"""The transport to one client, which the client cannot keep: neither by taking nothing nor by sending on.

A client that does not read has a time, and is then cut off with what was written to it. One that still sends when its
last answer is written is listened to for a moment: to close over unread bytes resets the connection, and a reset may
reach the client before the answer does.
"""

import asyncio
from collections.abc import Callable

from kvasir_http.limits import ClientLimits


class ClientTransport:
    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, limits: ClientLimits) -> None:
        self._transport = transport
        self._loop = loop
        self._limits = limits
        self.write = transport.write  # as quick as without this class between
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self.is_closing: Callable[[], bool] = transport.is_closing
        """As quick too, for every piece of a stream; not to be kept, since `close` puts another in its place."""
        self.is_client_sending = False
        """A request has begun to come and has not ended; the protocol tells."""
        self._num_discarded_bytes = 0
        self._num_untaken_bytes = 0
        self._reader_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """After what has been written."""
        if self.is_closing():
            return
        self.is_closing = _yes
        self.watch_reader()
        if self.is_client_sending:
            self._linger()
        else:
            self._transport.close()

    def lost(self) -> None:
        """There is no connection any more."""
        self.is_closing = _yes
        for timer in (self._reader_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def discard(self, num_bytes: int) -> None:
        """Of what comes while it lingers."""
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > self._limits.linger_bytes:
            self._transport.close()

    def watch_reader(self) -> None:
        """From when the write buffer is full until `unwatch_reader`, or until all is taken of what is to close."""
        if self._reader_timer is None:
            self._num_untaken_bytes = self._transport.get_write_buffer_size()
            self._reader_timer = self._loop.call_later(self._limits.reader_seconds, self._look_at_reader)

    def unwatch_reader(self) -> None:
        if self._reader_timer is not None and self.is_closing is not _yes:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _look_at_reader(self) -> None:
        self._reader_timer = None
        num_taken_bytes = self._num_untaken_bytes - self._transport.get_write_buffer_size()
        if num_taken_bytes < self._limits.reader_bytes:
            self.abort()
        else:
            self.watch_reader()

    def _linger(self) -> None:
        self._transport.write_eof()
        self._transport.resume_reading()
        self._linger_timer = self._loop.call_later(self._limits.linger_seconds, self._transport.close)


def _yes() -> bool:
    return True
