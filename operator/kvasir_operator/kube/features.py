"""What this cluster has beyond what every one has: which optional kinds it serves.

Asked at the start, again before every resync, and soon after the API server did not know a kind, so a CRD that is
installed or removed later is noticed without a restart. A kind that is absent costs one small request each time it is
asked for.

Before all work the API server must answer and know InferenceServices. That is waited for: an operator that ended
because the API server is away would be started again later and later, by the kubelet's back-off.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvasir_operator.errors import (
    CrdNotInstalledError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectNotFoundError,
)
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, OPTIONAL_KINDS, Kind
from kvasir_operator.queue.back_off import BackOff

logger = logging.getLogger(__name__)

SOON_SECONDS = 1.0
_BACK_OFF = BackOff(first_seconds=0.5, longest_seconds=5.0)
_UNAUTHORIZED = 401


async def read_kinds(client: KubeClient) -> frozenset[Kind]:
    """Those of OPTIONAL_KINDS that the API server knows. Raises KubeApiError when it does not answer."""
    return frozenset([kind for kind in OPTIONAL_KINDS if await _is_served(client, kind)])


async def _is_served(client: KubeClient, kind: Kind) -> bool:
    try:
        found = await client.read_path(f"/apis/{kind.api_version}")
    except (ObjectNotFoundError, KubeForbiddenError):
        return False
    return any(resource["name"] == kind.plural for resource in found["resources"])


class Discovery:
    """Keeps `kinds` up to date, and has every service looked at again once an interval, and when they changed."""

    def __init__(
        self,
        client: KubeClient,
        kinds: frozenset[Kind],
        on_change: Callable[[], None],
        resync: Callable[[], Awaitable[None]],
        soon_seconds: float = SOON_SECONDS,
    ) -> None:
        """`soon_seconds`: between two looks at least, since many passes may miss the same kind at once."""
        self.kinds = kinds
        self._client = client
        self._on_change = on_change
        self._resync = resync
        self._soon_seconds = soon_seconds
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        """The API server did not know a kind: what is believed of it may no longer hold."""
        self._doubted.set()

    async def run(self, interval_seconds: float) -> None:
        """Runs until cancelled."""
        while True:
            is_due = await self._wait(interval_seconds)
            try:
                if self._take(await read_kinds(self._client)) or is_due:
                    await self._resync()
            except KubeApiError as error:
                logger.warning("discovery and resync: %s", error)

    async def _wait(self, interval_seconds: float) -> bool:
        """Whether the interval has passed; else there was a doubt."""
        await asyncio.sleep(min(self._soon_seconds, interval_seconds))
        try:
            async with asyncio.timeout(interval_seconds):
                await self._doubted.wait()
        except TimeoutError:
            return True
        self._doubted.clear()
        return False

    def _take(self, found: frozenset[Kind]) -> bool:
        """Whether it is news."""
        if found == self.kinds:
            return False
        for kind in sorted(found ^ self.kinds, key=str):
            logger.info("the cluster %s %s", "serves" if kind in found else "no longer serves", kind.kind)
        self.kinds = found
        self._on_change()
        return True


async def wait_until_served(
    client: KubeClient, namespaces: Sequence[str] | None, back_off: BackOff = _BACK_OFF
) -> frozenset[Kind]:
    """Tries again for as long as the API server is away, and logs each cause once, not each try.

    Raises CrdNotInstalledError for a missing CRD, other KubeApiErrors where waiting would not help.
    """
    logged, num_failures = "", 0
    while True:
        try:
            kinds = await _ask(client, namespaces)
            break
        except KubeUnavailableError as error:
            if error.status == _UNAUTHORIZED:
                raise
            if str(error) != logged:
                logger.warning("waiting for the API server: %s", error)
            logged, num_failures = str(error), num_failures + 1
        await asyncio.sleep(back_off.delay_seconds(num_failures))
    if logged:
        logger.info("the API server answers")
    return kinds


async def _ask(client: KubeClient, namespaces: Sequence[str] | None) -> frozenset[Kind]:
    try:
        for namespace in namespaces or (None,):
            await anext(client.list_pages(INFERENCE_SERVICE, namespace))
    except ObjectNotFoundError as error:
        raise CrdNotInstalledError(f"{INFERENCE_SERVICE.plural}.{INFERENCE_SERVICE.group}") from error
    return await read_kinds(client)
