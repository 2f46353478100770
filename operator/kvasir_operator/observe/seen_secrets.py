"""Which Secrets of services were there a moment ago: no watch shows them, so that each pass of a burst would ask for
them anew.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvasir_operator.apply.plan import controller_uid
from kvasir_operator.kube.kinds import SECRET, KubeObject, ServiceKey, is_terminating, kind_of

LOOK_SECONDS: Final = 60.0


@dataclass(frozen=True)
class _Seen:
    secret: KubeObject
    until: float


class SeenSecrets:
    """By service, without what they hold."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._seen: dict[ServiceKey, list[_Seen]] = {}

    def of(self, key: ServiceKey, owner_uid: str) -> list[KubeObject]:
        """Those of the service with this UID, which need not be asked for."""
        return [each.secret for each in self._fresh(key) if controller_uid(each.secret) == owner_uid]

    def remember(self, key: ServiceKey, owner_uid: str, observed: Iterable[KubeObject]) -> None:
        """`observed` children of the service with this UID, among them those that were not asked for.

        One that is about to go, of this service or of a namesake before it, is asked for each time.
        """
        observed = [each for each in observed if kind_of(each) == SECRET]
        there = {each["metadata"]["uid"] for each in observed}
        fresh = [each for each in self._fresh(key) if each.secret["metadata"]["uid"] in there]
        known = {each.secret["metadata"]["uid"] for each in fresh}
        until = self._clock() + LOOK_SECONDS
        new = [
            _Seen(_without_data(each), until)
            for each in observed
            if each["metadata"]["uid"] not in known
            if controller_uid(each) == owner_uid and not is_terminating(each)
        ]
        self._seen[key] = [*fresh, *new]

    def forget(self, key: ServiceKey) -> None:
        self._seen.pop(key, None)

    def _fresh(self, key: ServiceKey) -> list[_Seen]:
        return [each for each in self._seen.get(key, ()) if self._clock() < each.until]


def _without_data(secret: KubeObject) -> KubeObject:
    metadata = {name: value for name, value in secret["metadata"].items() if name != "managedFields"}
    return {"apiVersion": secret["apiVersion"], "kind": secret["kind"], "metadata": metadata}
