"""Places that requests take: each admitted one takes its place at once, as the app does, and holds it to its end."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Any

from benchmarks.routing.virtual_time import VirtualTimeLoop

from kvasir_router.admission.admission import Admission, QueueLimits
from kvasir_router.admission.queued_request import QueuedRequest
from kvasir_router.admission.tenant_limits import TenantLimits


@dataclass(eq=False)
class Asked:
    """A request on its way through admission."""

    queued: QueuedRequest
    task: "asyncio.Task[None]" = field(init=False)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    has_started: bool = False
    waited_seconds: float | None = None

    @property
    def is_waiting(self) -> bool:
        return not self.has_started and not self.task.done()

    @property
    def error(self) -> BaseException | None:
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class Places:
    """`free`: by model."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        *,
        max_requests: int = 10,
        max_wait_seconds: float = 60.0,
        tenant_max_in_flight: int | None = None,
    ) -> None:
        self.loop = loop
        self.free: Counter[str | None] = Counter()
        self.started: list[Asked] = []
        self.tenant_limits = TenantLimits(None, tenant_max_in_flight, lambda: self.admission.wake())
        self.admission = Admission(
            lambda model, _: 0.0 if self.free[model] > 0 else inf,
            QueueLimits(max_requests, max_wait_seconds),
            self.tenant_limits,
        )

    def ask(self, tenant: str = "t", *, model: str = "m", waited_seconds: float = 0.0, **fields: Any) -> Asked:
        asked = Asked(QueuedRequest(model, tenant, fields.pop("num_tokens", 1000), **fields))
        asked.task = self.loop.create_task(self._take(asked, waited_seconds))
        self.loop.settle()
        return asked

    def give(self, count: int = 1, model: str = "m") -> None:
        self.free[model] += count
        self.loop.call(self.admission.wake)
        self.loop.settle()

    def give_and_take_back(self, model: str) -> None:
        """A place that is gone again before the woken request runs."""
        self.free[model] += 1
        self.loop.call(self.admission.wake)
        self.free[model] -= 1
        self.loop.settle()

    def finish(self, asked: Asked) -> None:
        """Its place is free again."""
        asked.end.set()
        self.loop.settle()

    def cancel(self, asked: Asked) -> None:
        asked.task.cancel()
        self.loop.settle()

    async def _take(self, asked: Asked, waited_seconds: float) -> None:
        asked.waited_seconds = await self.admission.admit(asked.queued, waited_seconds)
        self.free[asked.queued.model] -= 1
        asked.has_started = True
        self.started.append(asked)
        with self.tenant_limits.in_flight(asked.queued.tenant):
            await asked.end.wait()
        self.free[asked.queued.model] += 1
        self.admission.wake()
