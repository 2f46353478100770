"""What an engine's transfer agent and the connectors of its ranks say to each other, beside the plans of steps, so that
neither waits for the other. A rank answers a question under its number."""

import msgspec
import zmq

from kvasir_runtime.transfer.connector import Page, PagePair, Side
from kvasir_runtime.transfer.messages import Region


class AddPeer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    engine_id: str
    regions: list[Region]


class RemovePeer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    engine_id: str


class StartRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    """Of the read; its end is told under it."""
    engine_id: str
    pairs: list[PagePair]


class CancelRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Somebody may be reading."""


class GetChecksums(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    pages: list[Page]
    num_ranks: int
    side: Side


class OwnRegion(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank's first word: it can be spoken to."""

    region: Region


class PeerAdded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    error: str | None


class Checksums(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    of_pages: list[int] | None
    """None: they could not be computed."""


class ReadEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing writes the pages any more."""

    number: int
    has_failed: bool


ToConnector = AddPeer | RemovePeer | StartRead | CancelRead | Progress | GetChecksums
Answer = PeerAdded | Checksums
FromConnector = OwnRegion | Answer | ReadEnded

Socket = zmq.Socket[bytes]
