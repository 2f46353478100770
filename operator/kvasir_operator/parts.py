"""The tasks of a running operator. None may end by itself: the operator then ends, and Kubernetes starts it anew."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from kvasir_operator.errors import KvasirOperatorError

STOP_GRACE_SECONDS = 20.0


class Parts:
    """`on_end` is called with the reason when a part ends that was not stopped."""

    def __init__(
        self, on_end: Callable[[KvasirOperatorError], None], stop_grace_seconds: float = STOP_GRACE_SECONDS
    ) -> None:
        self._on_end = on_end
        self._stop_grace_seconds = stop_grace_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    def start(self, name: str, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(body, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    async def stop(self, draining: Collection[asyncio.Task[None]] = ()) -> None:
        """Waits a while for `draining`, which are about to end; then cancels the parts, last begun first."""
        self._is_stopping = True
        if draining:
            await asyncio.wait(draining, timeout=self._stop_grace_seconds)
        for task in reversed(self._tasks):
            task.cancel()
            await asyncio.wait({task}, timeout=self._stop_grace_seconds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._is_stopping and not task.cancelled():
            self._on_end(_why_ended(task.get_name(), task.exception()))


def _why_ended(name: str, cause: BaseException | None) -> KvasirOperatorError:
    if isinstance(cause, KvasirOperatorError):
        return cause
    error = KvasirOperatorError(f"the operator's {name} ended by itself: {cause!r}")
    error.__cause__ = cause
    return error
