"""How soon a status is stored: what it says at once, its details once a second.

A rollout changes counts and messages with every pod and with every count of a controller, and one write shows them all
as well. What people and programs wait for is no detail: conditions, phase, ready replicas, revisions, decisions.
"""

from collections.abc import Callable
from typing import Any, Final

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.status.report import is_news

DETAILS_SECONDS: Final = 1.0
_DETAILS: Final = frozenset({"replicas"})
_DETAILS_OF_ROLES: Final = frozenset({"draining", "message"})
_DETAILS_OF_CONDITIONS: Final = frozenset({"message"})


class StatusPace:
    """Of each service, since its status was stored last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._stored_at: dict[ServiceKey, float] = {}

    def wait_seconds(self, key: ServiceKey, previous: dict[str, Any], status: dict[str, Any]) -> float:
        """Until `status` may be stored in the place of `previous`; 0.0: now."""
        stored_at = self._stored_at.get(key)
        if stored_at is None or is_news(_without_details(previous), _without_details(status)):
            return 0.0
        return max(0.0, stored_at + DETAILS_SECONDS - self._clock())

    def stored(self, key: ServiceKey) -> None:
        self._stored_at[key] = self._clock()

    def forget(self, key: ServiceKey) -> None:
        self._stored_at.pop(key, None)


def _without_details(status: dict[str, Any]) -> dict[str, Any]:
    return {
        **_without(status, _DETAILS),
        "roles": [_without(each, _DETAILS_OF_ROLES) for each in status.get("roles", [])],
        "conditions": [_without(each, _DETAILS_OF_CONDITIONS) for each in status.get("conditions", [])],
    }


def _without(fields: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
