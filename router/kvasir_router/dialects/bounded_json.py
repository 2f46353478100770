"""A bound on what is decoded of a body: small values cost far more as objects than the bytes that they come in.

What is beyond it travels on undecoded, and routing makes do with its raw bytes. A dict takes some 200 bytes, so the
bound is about 50 MiB of objects, for an instant.
"""

from collections.abc import Mapping
from typing import Generic, TypeVar, cast

import msgspec

from kvasir_router.dialects.dialect import RoutingFields

Fields = TypeVar("Fields", bound=RoutingFields)

MAX_ELEMENTS = 2**18
"""Values in one piece of JSON, of however many bytes: as many token ids, or the JSON of a million tokens of text."""
_STARTS_OF_ELEMENTS = b",[{"
_ESCAPED = rb"\u00"  # a character that may be one of those in the JSON that a string holds: a tool call's arguments
SLICE_BYTES = 2**20
_FEWEST_BYTES = 2  # of an element


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


def is_too_much(*pieces: msgspec.Raw | bytes) -> bool:
    """All of them together may have more than MAX_ELEMENTS."""
    if sum(map(len, pieces)) <= _FEWEST_BYTES * MAX_ELEMENTS:
        return False
    return sum(_num_elements(bytes(piece)) for piece in pieces) > MAX_ELEMENTS


def _num_elements(piece: bytes) -> int:
    """At most: strings are not told apart, so a comma in one counts too. Slice by slice, so that others run meanwhile
    where this is done in a thread.
    """
    return 1 + sum(_num_starts(piece, at, at + SLICE_BYTES) for at in range(0, len(piece), SLICE_BYTES))


def _num_starts(piece: bytes, start: int, end: int) -> int:
    part = piece[start:end]
    num_escaped = piece.count(_ESCAPED, start, end + len(_ESCAPED) - 1)
    return len(part) - len(part.translate(None, _STARTS_OF_ELEMENTS)) + num_escaped


class BoundedDecoder(Generic[Fields]):
    """Of a body into some of its fields; beyond the bound, lists and objects are left raw whatever a field's type."""

    def __init__(self, fields: type[Fields]) -> None:
        self._large = msgspec.defstruct(f"Large{fields.__name__}", (), bases=(fields,), namespace={"is_large": True})
        self._decoder = msgspec.json.Decoder(fields)
        raw = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in fields.__struct_fields__]
        self._raw_decoder = msgspec.json.Decoder(msgspec.defstruct(f"Raw{fields.__name__}", raw))
        self._are_raw = {field.name for field in msgspec.structs.fields(fields) if field.type is msgspec.Raw}

    def decode(self, body: bytes) -> Fields:
        """Raises msgspec.DecodeError, UnicodeError or RecursionError."""
        if not is_too_much(body):
            return self._decoder.decode(body)
        given = msgspec.structs.asdict(self._raw_decoder.decode(body))
        values = {name: self._value(name, raw) for name, raw in given.items() if raw is not msgspec.UNSET}
        return cast(Fields, self._large(**values))

    def _value(self, name: str, raw: msgspec.Raw) -> object:
        is_left = name in self._are_raw or bytes(memoryview(raw)[:1]) in (b"[", b"{")
        return raw if is_left else msgspec.json.decode(raw)
