"""An event loop in virtual time: its clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

# A request that starts wakes the next one, and each takes a few turns of the loop.
_NUM_TURNS_TO_SETTLE = 100


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer runs: nothing will ever happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def close(self) -> None:
        """Ends what still runs."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.settle()
        super().close()

    def settle(self) -> None:
        """Runs whatever can run without time passing."""
        self.run_until_complete(_turns(_NUM_TURNS_TO_SETTLE))

    def advance(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))
        self.settle()

    def call(self, callback: Callable[[], object]) -> None:
        """As from code that runs on the loop, and nothing else runs."""
        asyncio.events._set_running_loop(self)
        try:
            callback()
        finally:
            asyncio.events._set_running_loop(None)
