"""Which model names services claim behind the gateway, and whose each of them is: the service's that was created first.

The gateway goes by the same rule (then by namespace and name), so what a status says of a name is what clients see.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir_operator.kube.kinds import ServiceKey, service_key


@dataclass(frozen=True, slots=True)
class _Claim:
    created: str
    names: tuple[str, ...]


class ModelNames:
    """Methods that change it return the other services whose names may be theirs, or no longer be, by it."""

    def __init__(self) -> None:
        self._claims: dict[ServiceKey, _Claim] = {}
        self._claimants: defaultdict[str, set[ServiceKey]] = defaultdict(set)

    def put(self, service: Mapping[str, Any]) -> set[ServiceKey]:
        """A state of a service, never an older one than before."""
        key, claim = service_key(service), _Claim(service["metadata"]["creationTimestamp"], claimed_names(service))
        if self._claims.get(key) == claim:
            return set()
        news = self.remove(key)
        self._claims[key] = claim
        for name in claim.names:
            self._claimants[name].add(key)
        return news | self._rivals(key, claim)

    def remove(self, key: ServiceKey) -> set[ServiceKey]:
        claim = self._claims.pop(key, None)
        if claim is None:
            return set()
        rivals = self._rivals(key, claim)
        for name in claim.names:
            self._claimants[name].discard(key)
            if not self._claimants[name]:
                del self._claimants[name]
        return rivals

    def names(self, key: ServiceKey) -> tuple[str, ...]:
        """What a service claims."""
        claim = self._claims.get(key)
        return () if claim is None else claim.names

    def taken(self, key: ServiceKey) -> dict[str, ServiceKey]:
        """Names that a service claims and an older one has, and which."""
        owners = {name: min(self._claimants[name], key=self._seniority) for name in self.names(key)}
        return {name: owner for name, owner in owners.items() if owner != key}

    def claimants(self) -> set[ServiceKey]:
        """Every service behind the gateway."""
        return {key for keys in self._claimants.values() for key in keys}

    def _rivals(self, key: ServiceKey, claim: _Claim) -> set[ServiceKey]:
        return {rival for name in claim.names for rival in self._claimants[name]} - {key}

    def _seniority(self, key: ServiceKey) -> tuple[str, ServiceKey]:
        return self._claims[key].created, key


def claimed_names(service: Mapping[str, Any]) -> tuple[str, ...]:
    """A service's model, its aliases and adapters where the gateway serves it; none where a router of its own does."""
    spec = service["spec"]
    if spec.get("router", {}).get("mode") != "gateway":
        return ()
    model, adapters = spec["model"], spec.get("engine", {}).get("adapters", {}).get("list", ())
    names = (model.get("name", service["metadata"]["name"]), *model.get("aliases", ()))
    return tuple(dict.fromkeys((*names, *(adapter["name"] for adapter in adapters))))


@dataclass(frozen=True)
class GatewayState:
    """What a pass knows of the gateway for one service behind it; gateway.py finds it out.

    `is_ready`: the gateway takes requests. `names`: model names that the service claims there.
    """

    is_ready: bool
    names: tuple[str, ...]
    taken: Mapping[str, ServiceKey] = field(default_factory=dict)
    """Those of its names that an older service has, and which."""

    @property
    def is_refused(self) -> bool:
        """No name is left by which a request could ask for it."""
        return len(self.taken) == len(self.names)

    @property
    def serves(self) -> bool:
        """A request that names the service reaches its engines."""
        return self.is_ready and not self.is_refused
