"""Which headers pass from one side to the other, byte for byte, and which concern one connection only."""

from collections.abc import Iterable

RawHeaders = Iterable[tuple[bytes, bytes]]
"""Names in lower case; values as they came, in whatever encoding."""

# RFC 9110 section 7.6.1: these concern one connection, not the message; so does whatever `connection` names.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)


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
