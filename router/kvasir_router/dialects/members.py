"""The members of a body's object, of which every value keeps its own bytes."""

from collections.abc import Mapping

import msgspec

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def members_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Each costs far more than its bytes. Raises msgspec.DecodeError or UnicodeError."""
    return _decoder.decode(body)


def body_of(members: Mapping[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode(members)


def with_member(body: bytes, name: str, value: bytes) -> tuple[bytes, bytes]:
    """In pieces: a long body is not written anew. Of two members of one name the last counts."""
    end = body.rindex(b"}")
    is_empty = body[:end].rstrip().endswith(b"{")
    separator = b"" if is_empty else b","
    return body[:end], b'%b"%b":%b}' % (separator, name.encode(), value)
