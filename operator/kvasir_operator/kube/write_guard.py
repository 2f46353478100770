"""Asks whether a write may be sent once more when there is a connection for it, right before it leaves.

A process that was paused while it waited for one (or its whole node was) would otherwise send on waking what another
leader has gone beyond. What was on the wire by then, the API server has had before the Lease ran out.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp


def write_guard(before_write: Callable[[], None]) -> aiohttp.TraceConfig:
    """`before_write` may raise: then nothing is sent, and the request fails with what it raised."""

    async def begin(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        context.is_write = params.method != "GET"

    async def connected(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        if context.is_write:
            before_write()

    guard = aiohttp.TraceConfig()
    guard.on_request_start.append(begin)
    guard.on_connection_create_end.append(connected)
    guard.on_connection_reuseconn.append(connected)
    return guard
