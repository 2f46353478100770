"""The seam to whatever moves the bytes of KV blocks between two engines' buffers.

A connector registers its rank's buffer, learns of peers, and reads their pages into its own. It knows nothing of
requests, leases or hashes. It is used from one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvasir_runtime.transfer.messages import Region

ReadState = Literal["reading", "done", "failed"]


@dataclass(frozen=True, slots=True)
class PagePair:
    """A page to fill, and the page of the peer that it is filled from: block ids."""

    ours: int
    theirs: int


class Connector(Protocol):
    def region(self) -> Region:
        """What a peer must know to read from here."""

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

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Of pages of this rank's own buffer, 64 bit each."""

    def close(self) -> None: ...
