"""Where long prompts are tokenised and hashed: a few threads, with a bound on what waits for them."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

INLINE_BYTES = 1024
"""Of a prompt: a smaller one is done on the event loop, in less than a millisecond."""
_NUM_THREADS = 2


class Threads:
    """Close it when nobody waits any more. At most `max_long_prompts` are being done or wait."""

    def __init__(self, max_long_prompts: int = 32) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompt")
        self._places = threading.Semaphore(max_long_prompts)
        self.num_refused = 0

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> Result | None:
        """None, and not done, where too many long prompts wait: a guess at once is better than the truth too late."""
        if num_bytes <= INLINE_BYTES:
            return work()
        if not self._places.acquire(blocking=False):
            self.num_refused += 1
            return None
        future = self._executor.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
