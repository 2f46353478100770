"""Leader election on a coordination.k8s.io Lease: one operator reconciles, the others stand by.

The protocol is client-go's: a holder renews; another takes over once it has itself seen no renewal for the Lease's
whole duration, by its own clock (clocks of different machines are never compared). A holder that could not renew
until shortly before that must end: from then on another may lead.

How often a Lease is looked at and how often it is written are two things: one that is to be taken over seldom is held
for long, written seldom, and still read often enough that its holder notices soon when somebody takes it by force.

A Lease that was there and is gone may have been uninstalled with its release, whose operators are told to end about
then: one that they made anew would bear no mark of Helm's, and be in the way of the next install.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir_operator.errors import KubeApiError, LeadershipLostError, ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import LEASE, KubeObject, NamespacedName

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTiming:
    """`duration_seconds` is how long others wait for a renewal, `gone_seconds` how long one that was seen must be gone
    before it is made anew, soon enough for its holder.

    The holder looks every `retry_seconds`, and renews it where its last write is `renew_seconds` old, 0: at each look.
    It gives up when for `renew_deadline_seconds` it could not renew it or, while that is not due, read that it is its
    own: `renew_seconds` and this are less than the duration.
    """

    duration_seconds: float = 15.0
    renew_deadline_seconds: float = 10.0
    renew_seconds: float = 0.0
    retry_seconds: float = 2.0
    gone_seconds: float = 4.0

    @classmethod
    def of(cls, duration_seconds: int) -> "LeaseTiming":
        """The defaults in proportion to a duration, which a Lease holds in whole seconds."""
        times = duration_seconds / cls.duration_seconds
        return cls(
            duration_seconds,
            cls.renew_deadline_seconds * times,
            retry_seconds=cls.retry_seconds * times,
            gone_seconds=cls.gone_seconds * times,
        )


@dataclass(frozen=True)
class SeenLease:
    """A Lease as last read, and when (own monotonic clock, seconds) its content last changed."""

    obj: KubeObject
    changed_at: float


def can_take(seen: SeenLease, identity: str, now: float) -> bool:
    """Whether the Lease is ours, free, or was not renewed for its whole duration."""
    spec = seen.obj.get("spec", {})
    holder = spec.get("holderIdentity")
    return not holder or holder == identity or now - seen.changed_at >= spec.get("leaseDurationSeconds", 0)


class LeaderElector:
    """Takes and keeps one Lease. `clock` gives monotonic seconds."""

    def __init__(
        self,
        client: KubeClient,
        lease: NamespacedName,
        identity: str,
        clock: Callable[[], float],
        timing: LeaseTiming,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_write` raises LeadershipLostError where others have this identity, and one of them may use it now."""
        self.lease = lease
        self._client = client
        self._identity = identity
        self._clock = clock
        self._timing = timing
        self._seen: SeenLease | None = None
        self._gone_since: float | None = None
        self._before_write = before_write
        self._is_ending = False
        self._written_at: float | None = None
        self._held_at: float | None = None

    @property
    def holder(self) -> str | None:
        """Who held it when it was last read; None where nobody did."""
        return None if self._seen is None else self._seen.obj.get("spec", {}).get("holderIdentity") or None

    async def take(self) -> bool:
        """Takes or renews the Lease if that is allowed now; False where another one holds it, or it cannot be read."""
        started = self._clock()
        held = await self._bounded(self._take())
        if held:
            self._written_at = self._held_at = started  # before the request: the API server may have written it at once
        return held

    async def look(self) -> None:
        """Reads the Lease, so that its age is known when it could be taken."""
        await self._bounded(self._look())

    def end(self) -> None:
        """From now on what is gone stays gone; the Lease is renewed until it is released."""
        self._is_ending = True

    async def keep(self) -> None:
        """Renews until cancelled. Raises LeadershipLostError when another may be leading."""
        while True:
            await asyncio.sleep(self._timing.retry_seconds)
            if await (self.take() if self._is_due() else self._still_holds()):
                continue
            if self.holder not in (None, self._identity):
                raise LeadershipLostError(f"{self.holder} took Lease {self.lease}")
            self.check()

    def check(self) -> None:
        """Raises LeadershipLostError unless the Lease is ours for certain: to be called before each write."""
        if self._held_at is None:
            raise LeadershipLostError(f"Lease {self.lease} is not held")
        if self._clock() - self._held_at >= self._timing.renew_deadline_seconds:
            raise LeadershipLostError(
                f"Lease {self.lease} was not renewed for {self._timing.renew_deadline_seconds:g} s: another may lead"
            )

    async def release(self) -> None:
        """Lets the next one lead at once; a failure only makes it wait for the Lease's duration."""
        self._held_at = None
        if self._seen is None or self.holder != self._identity:
            return
        try:
            self._before_write()
            await self._client.replace(self._lease(self._seen.obj, holder="", seconds=1))
        except (KubeApiError, LeadershipLostError) as error:
            logger.warning("Lease %s not released: %s", self.lease, error)

    def _is_due(self) -> bool:
        """Whether it is to be written: to be renewed, or made anew."""
        is_old = self._written_at is None or self._clock() - self._written_at >= self._timing.renew_seconds
        return is_old or self._gone_since is not None

    async def _still_holds(self) -> bool:
        started = self._clock()
        holds = await self._bounded(self._look()) and self.holder == self._identity
        if holds:
            self._held_at = started
        return holds

    async def _bounded(self, step: Coroutine[Any, Any, bool]) -> bool:
        """An API server that does not answer must not make a holder miss that it lost its Lease."""
        try:
            async with asyncio.timeout(self._timing.renew_deadline_seconds):
                return await step
        except ObjectConflictError:
            return False  # another one was faster
        except (KubeApiError, TimeoutError) as error:
            logger.warning("Lease %s neither read nor renewed: %s", self.lease, str(error) or "no answer in time")
            return False

    async def _look(self) -> bool:
        stored = await self._client.get(LEASE, self.lease.namespace, self.lease.name)
        if stored is not None:
            self._remember(stored)
        elif self._seen is not None and self._gone_since is None:
            after = self._timing.gone_seconds
            logger.warning("Lease %s is gone: made anew after %g s unless this operator ends", self.lease, after)
            self._gone_since = self._clock()
        return stored is not None

    async def _take(self) -> bool:
        if await self._renewed():
            return True
        if not await self._look():
            if not self._may_create():
                return False
            self._before_write()
            self._remember(await self._client.create(self._lease(None, self._identity)))
            return True
        assert self._seen is not None
        if not can_take(self._seen, self._identity, self._clock()):
            return False
        self._before_write()
        self._remember(await self._client.replace(self._lease(self._seen.obj, self._identity)))
        return True

    async def _renewed(self) -> bool:
        """Without a read, while nobody else wrote it: its version and UID say so."""
        if self._held_at is None or self._seen is None or self._gone_since is not None:
            return False
        self._before_write()
        try:
            self._remember(await self._client.replace(self._lease(self._seen.obj, self._identity)))
        except (ObjectConflictError, ObjectNotFoundError):
            return False
        return True

    def _may_create(self) -> bool:
        if self._gone_since is None:
            return True  # it never was there
        return not self._is_ending and self._clock() - self._gone_since >= self._timing.gone_seconds

    def _remember(self, stored: KubeObject) -> None:
        before = self._seen
        is_same = before is not None and before.obj.get("spec") == stored.get("spec")
        self._seen = SeenLease(stored, before.changed_at if before and is_same else self._clock())
        self._gone_since = None

    def _lease(self, stored: KubeObject | None, holder: str, seconds: float | None = None) -> KubeObject:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old: dict[str, Any] = (stored or {}).get("spec", {})
        is_same = old.get("holderIdentity") == holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(seconds or self._timing.duration_seconds),
            "acquireTime": old.get("acquireTime", now) if is_same else now,
            "renewTime": now,
            "leaseTransitions": old.get("leaseTransitions", 0) + (0 if is_same or not holder else 1),
        }
        # Of a stored one all is kept: labels and annotations are those of whoever installed it.
        metadata = {"name": self.lease.name, "namespace": self.lease.namespace} | (stored or {}).get("metadata", {})
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
