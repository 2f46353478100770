"""How long a client of the engine may take, and what a process holds for all, beside what `kvasir_http.limits` says."""

from dataclasses import dataclass

from kvasir_http.limits import ClientLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits(ClientLimits):
    body_seconds: float = 60.0
    """For all of a body: 8 MiB at 1.1 Mbit/s."""
    held_bytes: int = 1024 * 1024 * 1024
    """Of all bodies together, but two of the largest in any case: 256 KiB, which are the tokens of a long conversation,
    for each connection that a process takes."""


API_LIMITS = ApiLimits()
