"""How long clients of the router may take beside what `kvasir_http.connections` says."""

from dataclasses import dataclass

from kvasir_http.connections import ClientLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes(ClientLimits):
    body_seconds: float = 30.0
    """For a request's body, and one more for every `body_bytes_per_second` that have come."""
    body_bytes_per_second: float = 64 * 1024
    next_request_seconds: float = 0.5
    """While a server drains: from the end of an answer to the client's next request, if it has one."""


CLIENT_TIMES = ClientTimes()
