"""Which pages' scripts may read a forwarded answer, as browsers want to be told.

What the router answers itself, preflights among it, gets the same from Starlette's middleware.
"""

from collections.abc import Set

from kvasir_router.relay.headers import RawHeaders, value_of

EXPOSED_HEADERS = ("x-request-id", "retry-after")
_EXPOSED = (b"access-control-expose-headers", ", ".join(EXPOSED_HEADERS).encode())
_VARY = (b"vary", b"origin")


def cors_headers(origins: Set[bytes], asked_with: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Of the answer; none for who is no browser. `origins` are those allowed, `*` for all."""
    origin = value_of(asked_with, b"origin")
    if origin is None:
        return []
    if b"*" in origins:
        return [(b"access-control-allow-origin", b"*"), _EXPOSED]
    return [(b"access-control-allow-origin", origin), _EXPOSED, _VARY] if origin in origins else [_VARY]
