"""Where an engine is, as whoever finds it tells: the command line or the Kubernetes API."""

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What an engine does of a request. Clients' requests go to `takes_requests` only."""

    SERVE = "serve"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def takes_requests(self) -> bool:
        """A prefill engine gets its work with a decode engine's, never a whole request."""
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens. A pod that takes over another's IP has another `uid`, so nothing is inherited.

    Role, revision and weight are labels of one and the same engine: they may change without making it another.
    """

    url: str  # http://host:port
    uid: str = ""
    role: Role = field(default=Role.SERVE, compare=False)
    revision: str = field(default="", compare=False)  # "": not said
    traffic_weight: float | None = field(default=None, compare=False)  # percent of all requests; None: of the rest
