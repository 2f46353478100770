"""What a policy may know: immutable views of the endpoints at one moment, for one request."""

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


@dataclass(frozen=True, slots=True)
class EndpointView:
    """One usable endpoint. Token counts are this router's estimates, over the requests that it has in flight."""

    url: str
    revision: str = ""
    traffic_weight: float | None = None  # percent of requests that its revision gets; None: a part of the rest
    prefill_rate: float = 8000.0  # uncached prompt tokens/s, measured
    num_in_flight: int = 0
    max_in_flight: int = 512
    prefill_tokens: int = 0  # uncached prompt tokens whose first byte has not come yet
    resident_tokens: int = 0  # KV tokens that the requests in flight will hold
    cached_tokens: int = 0  # of this request's prompt
    kv_capacity_tokens: int | None = None  # None until the engine's metrics tell
    kv_usage: float | None = None  # share of KV blocks in use, 0..1, last scraped
    last_dispatch: int = 0  # number of the last request sent there; 0: none yet
    models: frozenset[str] | None = None  # None: serves whatever the router serves


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`avoid` holds the URLs already tried for this request: taken again only when nothing else is left."""

    endpoints: tuple[EndpointView, ...]
    avoid: frozenset[str] = field(default_factory=frozenset)
