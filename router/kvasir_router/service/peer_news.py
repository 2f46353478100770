"""What a router tells its peers, and its form on the wire: a msgpack array behind the sender's name, and a seal.

The seal is an HMAC by the secret that the service's routers share: who has not got it is not believed. Nothing here is
of a prompt; requests go by their ids and lengths.
"""

import hmac
from collections.abc import Sequence

import msgspec

from kvasir_router.admission.queued_request import Waiting

NAME_BYTES = 16
"""Of a sender's name."""
_VERSION = 2
_PURPOSE = b"kvasir peers\n"  # no other message is sealed with the same key


class MalformedNewsError(Exception):
    """The message is no news of a peer that this router can read."""


class Dispatched(msgspec.Struct, array_like=True, tag="d", gc=False, frozen=True):
    """`number` names the ticket from now on, among those of its router for the service."""

    number: int
    url: str
    request_id: str
    cached_tokens: int
    uncached_tokens: int
    num_output_tokens: int
    received_tokens: int


class Prefilled(msgspec.Struct, array_like=True, tag="p", gc=False, frozen=True):
    """`num_generated_tokens` were computed again; None: the first token was not seen. `seconds`: since its dispatch."""

    number: int
    num_generated_tokens: int | None
    seconds: float


class Finished(msgspec.Struct, array_like=True, tag="f", gc=False, frozen=True):
    number: int


Event = Dispatched | Prefilled | Finished


class News(msgspec.Struct, array_like=True, frozen=True):
    """Of one service, in order. `waiting`: the request that the router would start next."""

    events: Sequence[Event]
    waiting: Waiting | None = None


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """`number` counts a router's frames, so that a lost one shows. `services`: by name, those with news."""

    version: int
    number: int
    services: dict[str, News]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class Seal:
    """`secret` None: nothing is set, and whoever reaches the port is believed."""

    def __init__(self, secret: str | None) -> None:
        self._key = (secret or "").encode()

    def write(self, sender: bytes, number: int, services: dict[str, News]) -> list[bytes]:
        payload = _encoder.encode(Frame(_VERSION, number, services))
        return [sender, payload, self._of(sender, payload)]

    def read(self, message: Sequence[bytes]) -> tuple[int, dict[str, News]]:
        """The frame's number, and its news. Raises MalformedNewsError."""
        if len(message) != 3:
            raise MalformedNewsError(f"a message of {len(message)} parts, not 3")
        sender, payload, seal = message
        if len(sender) != NAME_BYTES:
            raise MalformedNewsError(f"a sender's name of {len(sender)} bytes, not {NAME_BYTES}")
        if not hmac.compare_digest(seal, self._of(sender, payload)):
            raise MalformedNewsError("its seal is of another secret")
        try:
            frame = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedNewsError(f"a message of {len(payload)} bytes is no news: {error}") from error
        if frame.version != _VERSION:
            raise MalformedNewsError(f"it has version {frame.version}; this router reads version {_VERSION}")
        return frame.number, frame.services

    def _of(self, sender: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, _PURPOSE + sender + payload, "sha256")
