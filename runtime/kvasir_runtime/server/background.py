"""Answers that nobody waits for (`background` of /v1/responses): each is a task that this owns until it has ended.

They count as requests under way, so a server that drains waits for them as it does for others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvasir_runtime.server.admission import Admission

logger = logging.getLogger(__name__)


class BackgroundTasks:
    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """What is left by now is cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        with self._admission.admit():
            try:
                await work()
            except Exception:
                logger.exception("work in the background has a defect")
