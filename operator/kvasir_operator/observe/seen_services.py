"""Services as they were a moment ago, so that the passes of a rollout need not ask for theirs one by one.

The watch of services shows them, and so does the answer to a write of their status. What went away while that watch was
broken it never tells: so a service that has not been shown for a while is asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvasir_operator.kube.kinds import KubeObject, ServiceKey

LOOK_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """`text`: as JSON; None of a service that was deleted."""

    text: bytes | None
    version: int
    until: float


class SeenServices:
    """A state gives way only to a newer one, for as long as it is known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._seen: dict[ServiceKey, _Seen] = {}

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._seen)

    def of(self, key: ServiceKey) -> KubeObject | None:
        """None where it must be asked for."""
        found = self._known(key)
        if found is None or found.text is None:
            return None
        obj: KubeObject = msgspec.json.decode(found.text)
        return obj

    def watch(self, event_type: str | None, service: Mapping[str, Any]) -> None:
        """Takes an event of the services' watch; `event_type` is None for an object of a list."""
        self._put(service, is_deleted=event_type == "DELETED")

    def put(self, service: Mapping[str, Any]) -> None:
        """The answer to a write."""
        self._put(service, is_deleted=False)

    def forget(self, key: ServiceKey) -> None:
        """What was seen no longer holds."""
        self._seen.pop(key, None)

    def _put(self, service: Mapping[str, Any], is_deleted: bool) -> None:
        metadata = service["metadata"]
        key, version = ServiceKey(metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
        before = self._known(key)
        if before is not None and before.version >= version:
            return
        now = self._clock()
        self._seen.pop(key, None)
        while self._seen and self._seen[oldest := next(iter(self._seen))].until <= now:  # they are in order of time
            del self._seen[oldest]
        self._seen[key] = _Seen(None if is_deleted else _text(service), version, now + LOOK_SECONDS)

    def _known(self, key: ServiceKey) -> _Seen | None:
        found = self._seen.get(key)
        return None if found is None or self._clock() >= found.until else found


def _text(service: Mapping[str, Any]) -> bytes:
    metadata = {name: value for name, value in service["metadata"].items() if name != "managedFields"}
    return msgspec.json.encode({**service, "metadata": metadata})
