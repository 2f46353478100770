"""What the engine core and its transfer agent tell each other. Each side alone owns its state: the core the blocks, the
agent the peers, the leases and the bytes under way."""

from dataclasses import dataclass
from typing import Literal

BlockIds = tuple[int | None, ...]
"""One block of every KV group; None where it lies behind the group's window."""
EndOfOffer = Literal["pulled", "declined", "expired", "replaced", "withdrawn"]
OFFER_ENDS: tuple[EndOfOffer, ...] = ("pulled", "declined", "expired", "replaced", "withdrawn")
FailureReason = Literal["unreachable", "handshake", "unknown", "withdrawn", "prompt", "checksum", "read", "lease",
                        "timeout", "cancelled"]  # fmt: skip
FAILURE_REASONS: tuple[FailureReason, ...] = (
    "unreachable", "handshake", "unknown", "withdrawn", "prompt", "checksum", "read", "lease", "timeout",
)  # fmt: skip
"""Those that count as failures: a cancelled pull is nobody's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where other engines find this one."""

    engine_id: str
    pipeline_size: int = 1
    host: str
    port: int
    """Of the side channel."""
    tensor_size: int = 1
    """Ranks of each of its pipeline stages."""


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A full block that is written, and held until its offer ends."""

    block_hash: bytes
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class BeginOffer:
    """Blocks will be kept under the key."""

    key: str
    request_id: str
    is_announced: bool = False
    """Whoever comes for them may know the engine, and not which of its data-parallel ranks keeps them."""


@dataclass(frozen=True, slots=True)
class OfferBlocks:
    """The next of them are written."""

    key: str
    request_id: str
    """Whose they are: another request may have come under the key meanwhile."""
    blocks: list[OfferedBlock]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class WithdrawOffer:
    """They are not kept any more."""

    key: str
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginPull:
    """Ask another engine for the blocks of a prompt."""

    request_id: str
    host: str
    port: int
    key: str
    hashes: list[bytes]
    """Of all full blocks that are wanted, from the first of the prompt on."""
    first: int
    """Of them, the first that is not here."""
    is_lookup: bool = False
    """The other side has not been told to keep them: it is asked for what it has cached."""
    patience_seconds: float | None = None
    """After so long it is given up, whatever has come; None: while blocks come, never."""


@dataclass(frozen=True, slots=True)
class ReadInto:
    """Where the pulled blocks go. Nothing else writes them until the pull has ended."""

    request_id: str
    block_ids: dict[int, BlockIds]
    """By index; blocks that are here already are left out."""
    num_blocks: int | None = None
    """Of the pull that these pages are for; None: as many as were asked for at first."""


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Nobody wants them any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """The blocks of an offer need not be kept any more."""

    request_id: str
    reason: EndOfOffer


@dataclass(frozen=True, slots=True)
class LookUp:
    """A peer asks for what is cached of these; to be offered under the key."""

    key: str
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Shortened:
    """Of a pull only so many blocks are to be had. None is read before there are pages for as many (`ReadInto`)."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Failure:
    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class PullEnded:
    """Nothing writes its pages any more."""

    request_id: str
    num_blocks: int
    """From the first of the prompt on, so many hold what they should."""
    failure: Failure | None = None


ToAgent = BeginOffer | OfferBlocks | WithdrawOffer | BeginPull | ReadInto | CancelPull
FromAgent = OfferEnded | LookUp | Shortened | PullEnded
