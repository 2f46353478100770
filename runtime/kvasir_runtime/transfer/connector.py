"""The seam to whatever moves the bytes of KV blocks between two engines' buffers.

A connector registers the buffers of its ranks, learns of peers, and reads their pages into its own. It knows nothing of
requests, leases or hashes. It is used from one thread.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvasir_runtime.transfer.messages import Region

ReadState = Literal["reading", "done", "failed"]
Side = Literal["read", "written"]
"""Whether pages were read from another engine, or written to be read by it."""

CHECKSUM_MODULUS = 2**64


class Page(msgspec.Struct, frozen=True, array_like=True):
    """One block of a KV group: what each rank of an engine keeps of it."""

    block_id: int
    group: int = 0


class PagePair(msgspec.Struct, frozen=True, array_like=True):
    """A page to fill, and the page of the peer that it is filled from: block ids."""

    ours: int
    theirs: int
    group: int = 0


class Connector(Protocol):
    def regions(self) -> list[Region]:
        """What a peer must know to read from here: one a rank, pipeline stage by stage."""

    def add_peer(self, engine_id: str, regions: Sequence[Region]) -> None:
        """Raises KvTransferError when it cannot be read from."""

    def remove_peer(self, engine_id: str) -> None:
        """Unknown ones have gone already."""

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        """A number for the read that begins. Raises KvTransferError."""

    def state(self, read: int) -> ReadState:
        """A read that is done or failed writes nothing any more, and its number is forgotten."""

    def cancel(self, read: int) -> None:
        """Nobody wants the data; `state` tells when nothing is written any more."""

    def progress(self) -> None:
        """Give a moment to those who read from here; to be called again and again while somebody may."""

    def checksums(self, pages: Sequence[Page], num_ranks: int, side: Side) -> list[int]:
        """Of pages of our own; `num_ranks` are those of a stage of the other engine. Those of several ranks are added
        up, modulo CHECKSUM_MODULUS."""

    def close(self) -> None: ...
