"""Which headers pass from one side to the other, byte for byte, and which concern one connection only."""

from collections.abc import Iterable, Set

RawHeaders = Iterable[tuple[bytes, bytes]]
"""Names in lower case; values as they came, in whatever encoding."""

# RFC 9110 section 7.6.1: these concern one connection, not the message; so does whatever `connection` names.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)


EXPOSED_HEADERS = ("x-request-id", "retry-after")
_EXPOSED = (b"access-control-expose-headers", ", ".join(EXPOSED_HEADERS).encode())
_VARY = (b"vary", b"origin")


def cors_headers(origins: Set[bytes], asked_with: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Which pages' scripts may read a forwarded answer; none for who is no browser. `origins` are those allowed, `*`
    for all. What the router answers itself gets the same from Starlette's middleware.
    """
    origin = value_of(asked_with, b"origin")
    if origin is None:
        return []
    if b"*" in origins:
        return [(b"access-control-allow-origin", b"*"), _EXPOSED]
    return [(b"access-control-allow-origin", origin), _EXPOSED, _VARY] if origin in origins else [_VARY]


def end_to_end(headers: RawHeaders, not_passed: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    """In their order, without those of the connection and those not to be passed."""
    dropped = _HOP_BY_HOP | not_passed
    headers = list(headers)
    for name, value in headers:
        if name == b"connection":
            dropped |= {option.strip().lower() for option in value.split(b",")}
    return [header for header in headers if header[0] not in dropped]


def lines(headers: RawHeaders) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def value_of(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first one's."""
    for key, value in headers:
        if key == name:
            return value
    return None
