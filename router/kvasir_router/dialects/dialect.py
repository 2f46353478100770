"""The seam between the APIs that clients speak and the router, which knows requests, prompts and streams only.

A dialect reads the few fields that routing needs; the engine validates everything, and the original bytes travel on, so
a wrong type here is no error.

What is decoded of a body is bounded: small values cost far more as objects than the bytes that they come in. What is
beyond the bound travels on undecoded, and routing makes do with its raw bytes. A dict takes some 200 bytes, so the
bound is about 50 MiB of objects, for an instant.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import msgspec

from kvasir_router.errors import RequestError

ABSENT = msgspec.Raw(b"null")


class Prompt(msgspec.Struct, frozen=True):
    """What an engine prefills, as far as a body tells. Images and audio are not counted as text."""

    content: bytes  # grows at the end when a conversation grows; or token ids as uint32, little-endian
    is_token_ids: bool
    seed: bytes  # what prompts must have in common to share blocks: API, the model's own name (an adapter's too), salt
    messages: msgspec.Raw | None = None  # chat: for an index that renders the template itself
    template_fields: tuple[tuple[str, msgspec.Raw], ...] = ()  # chat: tools, chat_template_kwargs, ...; those given
    is_text: bool = False  # the content is the very text that an engine tokenises
    is_batch: bool = False  # several prompts, each with an answer of its own
    model: str | None = None  # its own name, an adapter's too
    cache_salt: msgspec.Raw = ABSENT


class RoutingFields(msgspec.Struct, gc=False):
    """What bodies of every API may hold; each dialect adds where its prompt is. Raw values stay undecoded.

    From `n` on: what decides whether another engine may compute the prompt's KV, or go on from what was computed.
    """

    model: Any = None
    stream: Any = False
    priority: Any = 0
    user: Any = None
    cache_salt: msgspec.Raw = ABSENT
    n: Any = 1
    best_of: Any = None
    echo: Any = False
    prompt_logprobs: Any = None
    kv_transfer_params: msgspec.Raw = ABSENT

    is_large: ClassVar[bool] = False
    """Of a body that is too much to decode: its parts may be, too."""

    @property
    def holder(self) -> str | None:
        """Mark of the engine that keeps what the request goes on from; None: it needs nothing that is kept."""
        return None


def seed(api: str, model: str | None, fields: RoutingFields) -> bytes:
    """Prompts share blocks only within a model, a salt and a way of being turned into tokens."""
    return b"\0".join((api.encode(), (model or "").encode(), bytes(fields.cache_salt)))


class Dialect(Protocol):
    """`end_of_stream` is a stream's last event; None where the API has no streams, or how they end is not known.
    `num_output_tokens` is what a request is expected to generate: KV that it will hold besides its prompt's.
    `has_kv_transfer`: engines take `kv_transfer_params` in its bodies.
    """

    name: str
    end_of_stream: bytes | None
    num_output_tokens: int
    has_kv_transfer: bool

    def read(self, body: bytes) -> RoutingFields:
        """Raises msgspec.DecodeError, UnicodeError or RecursionError when the body is not a JSON object in UTF-8."""
        ...

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        """Of what `read` has returned; None: nothing is prefilled. `model` is the model's own name.

        Raises msgspec.DecodeError or UnicodeError.
        """
        ...

    def error_body(self, error: RequestError) -> bytes: ...

    def error_event(self, error: RequestError) -> bytes:
        """The same as the last event of a stream that has begun."""
        ...


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


class Reader(Generic[Fields]):
    """What dialects do alike; by itself of an API that an engine answers without its device: nothing is prefilled."""

    decoder: BoundedDecoder[Any] = BoundedDecoder(RoutingFields)
    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def read(self, body: bytes) -> RoutingFields:
        return cast(RoutingFields, self.decoder.decode(body))

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        return self.prompt_of(cast(Fields, fields), model)

    def prompt_of(self, fields: Fields, model: str | None) -> Prompt | None:
        return None
