"""What a pass knows of the gateway for one service behind it; gateway.py finds it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir_operator.kube.kinds import ServiceKey


@dataclass(frozen=True)
class GatewayState:
    """`is_ready`: the gateway takes requests. `names`: model names that the service claims there."""

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
