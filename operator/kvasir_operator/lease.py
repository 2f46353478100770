"""Leader election on a coordination.k8s.io Lease: one operator reconciles, the others stand by.

The protocol is client-go's: a holder renews; another takes over once it has itself seen no renewal for the Lease's
whole duration, by its own clock (clocks of different machines are never compared). A holder that could not renew
until shortly before that must end: from then on another may lead.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir_operator.errors import KubeApiError, LeadershipLostError, ObjectConflictError
from kvasir_operator.kinds import LEASE, KubeObject
from kvasir_operator.kube import KubeClient

logger = logging.getLogger(__name__)

LEASE_NAME = "kvasir-operator"


@dataclass(frozen=True)
class LeaseTiming:
    """`duration_seconds` is how long others wait; the holder gives up after `renew_deadline_seconds`, which is less."""

    duration_seconds: float = 15.0
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0


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
        self, client: KubeClient, namespace: str, identity: str, clock: Callable[[], float], timing: LeaseTiming
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._timing = timing
        self._seen: SeenLease | None = None
        self._renewed_at = 0.0

    async def acquire(self) -> None:
        """Returns once the Lease is held; waits for as long as another one holds it."""
        logger.info("waiting for Lease %s/%s as %s", self._namespace, LEASE_NAME, self._identity)
        while not await self._try():  # noqa: ASYNC110, the Lease is not in this process
            await asyncio.sleep(self._timing.retry_seconds)
        logger.info("leading as %s", self._identity)

    async def keep(self) -> None:
        """Renews until cancelled. Raises LeadershipLostError when another may be leading."""
        while True:
            await asyncio.sleep(self._timing.retry_seconds)
            if await self._try():
                continue
            if self._holder() not in (None, self._identity):
                raise LeadershipLostError(f"{self._holder()} took Lease {self._namespace}/{LEASE_NAME}")
            if self._clock() - self._renewed_at >= self._timing.renew_deadline_seconds:
                raise LeadershipLostError(
                    f"Lease {self._namespace}/{LEASE_NAME} not renewed for {self._timing.renew_deadline_seconds:g} s"
                )

    async def release(self) -> None:
        """Lets the next one lead at once; a failure only makes it wait for the Lease's duration."""
        if self._seen is None or self._holder() != self._identity:
            return
        try:
            await self._client.replace(self._lease(self._seen.obj, holder="", seconds=1))
        except KubeApiError as error:
            logger.warning("Lease %s/%s not released: %s", self._namespace, LEASE_NAME, error)

    async def _try(self) -> bool:
        """Takes or renews the Lease if that is allowed now."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._timing.renew_deadline_seconds):
                held = await self._take()
        except ObjectConflictError:
            return False  # another one was faster
        except (KubeApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s not renewed: %s", self._namespace, LEASE_NAME, error)
            return False
        if held:
            self._renewed_at = started
        return held

    async def _take(self) -> bool:
        stored = await self._client.get(LEASE, self._namespace, LEASE_NAME)
        if stored is None:
            self._remember(await self._client.create(self._lease(None, self._identity)))
            return True
        self._remember(stored)
        assert self._seen is not None
        if not can_take(self._seen, self._identity, self._clock()):
            return False
        self._remember(await self._client.replace(self._lease(stored, self._identity)))
        return True

    def _remember(self, stored: KubeObject) -> None:
        if self._seen is None or self._seen.obj.get("spec") != stored.get("spec"):
            self._seen = SeenLease(stored, self._clock())
        else:
            self._seen = SeenLease(stored, self._seen.changed_at)

    def _holder(self) -> str | None:
        return None if self._seen is None else self._seen.obj.get("spec", {}).get("holderIdentity") or None

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
        metadata = {"name": LEASE_NAME, "namespace": self._namespace}
        if stored is not None:
            metadata["resourceVersion"] = stored["metadata"]["resourceVersion"]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
