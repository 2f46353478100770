"""Reading of bodies that would hold up the event loop: in a thread, and one at a time, to bound the objects held."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

LOOP_BYTES = 4 * 2**20
"""Up to here a body is read on the event loop, in at most 18 ms. One of 64 MiB takes 0.2 to 0.5 s; read in a
thread, it lets the loop run every 0.13 s at least: a long string is decoded in one call.
"""


class LargeBodies:
    def __init__(self) -> None:
        self._reading = asyncio.Lock()

    async def read(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        if num_bytes <= LOOP_BYTES:
            return work()
        async with self._reading:
            return await asyncio.to_thread(work)
