"""Reading of bodies that would hold up the event loop: in a thread, and one at a time, to bound the objects held.

What is made of a body until its prompt is hashed takes several times its bytes. So few of those that are not small are
worked on at once (`turn`), and the others wait as bytes.

A thread cannot be cancelled: who is cancelled while it reads ends when the thread has, and holds the body until then.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

SMALL_BYTES = 256 * 2**10
_NUM_MIDDLE = 4  # between small and large, worked on at once
_AT_ONCE = contextlib.nullcontext()
LOOP_BYTES = 4 * 2**20
"""Up to here a body is read on the event loop, in at most 18 ms. One of 64 MiB takes 0.2 to 0.5 s; read in a
thread, it lets the loop run every 0.13 s at least: a long string is decoded in one call.
"""


class LargeBodies:
    """Up to `loop_bytes` a body is read on the event loop."""

    def __init__(self, loop_bytes: int = LOOP_BYTES) -> None:
        self._loop_bytes = loop_bytes
        self._reading = asyncio.Lock()
        self._middle = asyncio.Semaphore(_NUM_MIDDLE)
        self._large = asyncio.Lock()

    def turn(self, num_bytes: int) -> contextlib.AbstractAsyncContextManager[None]:
        """To be held while a body is worked on."""
        if num_bytes <= SMALL_BYTES:
            return _AT_ONCE
        return self._middle if num_bytes <= self._loop_bytes else self._large

    async def read(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        if num_bytes <= self._loop_bytes:
            return work()
        async with self._reading:
            reading = asyncio.get_running_loop().run_in_executor(None, work)
            is_cancelled = False
            while not reading.done():
                try:
                    await asyncio.wait([reading])
                except asyncio.CancelledError:
                    is_cancelled = True
            if is_cancelled:
                reading.exception()  # nobody is left to be told
                raise asyncio.CancelledError
            return reading.result()
