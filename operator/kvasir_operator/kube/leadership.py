"""Which Leases a leader holds, and holding all of them.

A release's own Lease says which of its replicas leads: one in each namespace that it watches, or in its own. Where it
serves the whole cluster it holds one more, of one name in one namespace whatever the release, so that a second
cluster-wide release stands by and says who leads, instead of fighting over every service. That namespace is `default`:
every cluster has it and nobody can delete it, while some clouds let nobody write to kube-system.

The cluster's Lease is a claim of the release and not of a process: its holder is the name of the release's own Lease,
and who holds that one may use it. So a replica takes over from another as soon as the own Lease allows, and the claim,
which only another release waits for, is renewed once a minute.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvasir_operator.errors import KvasirOperatorError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import NamespacedName
from kvasir_operator.kube.lease import LeaderElector, LeaseTiming
from kvasir_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

OWN_LEASE = "kvasir-operator"
CLUSTER_LEASE = "kvasir-operator-cluster-wide"
CLAIM_TIMING: Final = LeaseTiming(duration_seconds=90.0, renew_seconds=60.0)
"""Another release waits for this long after one that ended without a word."""


def lease_names(settings: OperatorSettings, own_namespace: str | None) -> list[NamespacedName]:
    """In the order in which they are taken; `own_namespace` is None outside a pod.

    Raises KvasirOperatorError where there is no namespace for one.
    """
    if not settings.leader_election:
        return []
    if settings.lease_namespace is not None:
        own: Collection[str] = [settings.lease_namespace]
    elif settings.namespace:
        own = sorted(settings.namespace)  # one order for all operators: they never wait for each other in a circle
    elif own_namespace is not None:
        own = [own_namespace]
    else:
        raise KvasirOperatorError(
            "--leader-election needs a namespace for its Lease: give --lease-namespace (this is not a pod)"
        )
    leases = [NamespacedName(namespace, OWN_LEASE) for namespace in own]
    return leases if settings.namespace else [*leases, NamespacedName(settings.cluster_lease_namespace, CLUSTER_LEASE)]


def make_electors(
    client: KubeClient, names: Sequence[NamespacedName], identity: str, clock: Callable[[], float], timing: LeaseTiming
) -> list[LeaderElector]:
    """For `names` as lease_names gives them. `identity` is this process's; `timing` is that of all but the claim."""
    own = [LeaderElector(client, each, identity, clock, timing) for each in names if each.name != CLUSTER_LEASE]

    def check_own() -> None:
        for elector in own:
            elector.check()

    release = ",".join(str(elector.lease) for elector in own)
    claims = [each for each in names if each.name == CLUSTER_LEASE]
    return [*own, *(LeaderElector(client, each, release, clock, CLAIM_TIMING, check_own) for each in claims)]


class Leadership:
    """Leads while it holds every one of its Leases; at once where it has none."""

    def __init__(self, electors: Sequence[LeaderElector], retry_seconds: float) -> None:
        self._electors = electors
        self._retry_seconds = retry_seconds
        self._reported: tuple[NamespacedName, str | None] | None = None

    async def acquire(self) -> None:
        """Returns once all Leases are held; waits for as long as another one holds any."""
        while not await self._take_all():  # noqa: ASYNC110, the Leases are not in this process
            await asyncio.sleep(self._retry_seconds)
        logger.info("leading")

    async def keep(self) -> None:
        """Renews until cancelled. Raises LeadershipLostError when another may be leading."""
        keeping = [asyncio.create_task(elector.keep()) for elector in self._electors]
        try:
            await asyncio.gather(*keeping)
        finally:
            for each in keeping:
                each.cancel()

    def end(self) -> None:
        """To be called when this process is told to end, before it drains."""
        for elector in self._electors:
            elector.end()

    def check(self) -> None:
        """Raises LeadershipLostError unless every Lease is held for certain: to be called before each write."""
        for elector in self._electors:
            elector.check()

    async def release(self) -> None:
        """The last one taken first: who holds the first may then take all."""
        for elector in reversed(self._electors):
            await elector.release()

    async def _take_all(self) -> bool:
        """Takes them in order, renewing those that are held. Beyond one that is not, it only looks."""
        held = True
        for elector in self._electors:
            if not held:
                await elector.look()
            elif not await elector.take():
                held = False
                self._report(elector)
        return held

    def _report(self, elector: LeaderElector) -> None:
        """Once for each holder."""
        if (news := (elector.lease, elector.holder)) == self._reported or elector.holder is None:
            return
        self._reported = news
        if elector.lease.name == CLUSTER_LEASE:
            logger.warning(
                "%s serves the whole cluster (it holds Lease %s): this operator stands by. Uninstall one of the two "
                "releases, or give each namespaces of its own with --namespace",
                elector.holder,
                elector.lease,
            )
        else:
            logger.info("standing by: %s holds Lease %s", elector.holder, elector.lease)
