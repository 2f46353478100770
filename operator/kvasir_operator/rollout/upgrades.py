"""Whose engines are replaced at the same time because the installation has changed, by an image or its defaults.

Each needs room for one more engine, and all would load their models at once. So where there is a limit the others serve
on with the revision that they have. A rollout that a manifest asks for never waits, and counts; so does one that is
halted, which keeps an image that does not start from going any further.
"""

from collections.abc import Iterable

from kvasir_operator.kube.kinds import KubeObject, ServiceKey
from kvasir_operator.rollout.workload import RevisionName, Workload


class Upgrades:
    """Rollouts under way, as far as passes have seen them."""

    def __init__(self, most: int | None) -> None:
        """`most`: services at a time; None: all."""
        self._most = most
        self._rolling: set[ServiceKey] = set()

    def has_to_wait(
        self, key: ServiceKey, obj: KubeObject, revision: RevisionName, workloads: Iterable[Workload]
    ) -> bool:
        """`revision` is the one that is wanted now."""
        revisions = {each.key.revision for each in workloads if each.replicas}
        if not revisions - {revision}:
            self.forget(key)
            return False
        is_asked_for = obj.get("status", {}).get("observedGeneration") != obj["metadata"]["generation"]
        is_under_way = key in self._rolling or revision in revisions
        if self._most is not None and len(self._rolling) >= self._most and not (is_asked_for or is_under_way):
            return True
        self._rolling.add(key)
        return False

    def forget(self, key: ServiceKey) -> None:
        """May be repeated."""
        self._rolling.discard(key)
