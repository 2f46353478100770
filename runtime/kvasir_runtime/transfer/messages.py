"""What two engines say to each other over the side channel: msgpack arrays that begin with their name.

The decode side asks, the prefill side answers, and tells of blocks as they are written. The first exchange has the
shape of vLLM's (`get_meta_msg` and a rank); the others are ours, so a version goes with the first, and nothing is said
to an engine of another version.
"""

import msgspec

VERSION = 3


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal before KV of one engine means anything to another."""

    version: int = VERSION
    """Of these messages."""
    model: str
    """Digest of configuration, tokenizer and samples of the weights."""
    revision: str
    """As the operator names it; engines of two revisions exchange nothing."""
    dtype: str
    """Of the KV, as torch spells it."""
    block_size: int
    kv_layout: str
    """What each layer keeps, and how pages are put together."""
    pipeline_cut: list[int]
    """Layers of each pipeline stage."""
    hash_rule: str


class Region(msgspec.Struct, frozen=True, array_like=True):
    """The KV buffer of one rank, and how to read from it."""

    agent_metadata: bytes
    """Of the rank's connector."""
    base_address: int
    page_bytes: int
    device_id: int


class GetMeta(msgspec.Struct, frozen=True, array_like=True, tag="get_meta_msg"):
    """Who are you? Asked once a connection."""

    rank: int
    """Of the asking engine; the answer is the same for all."""
    version: int = VERSION


class Meta(msgspec.Struct, frozen=True, array_like=True, tag="meta"):
    identity: Identity
    engine_id: str
    regions: list[Region]
    """One a rank: the tensor-parallel ranks of each pipeline stage, stage by stage."""


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """Tell me of the blocks kept under the key, from index `first` on, as they are written."""

    key: str
    first: int
    hashes: list[bytes] = []
    """Where the key is the asking side's own: of the blocks that it looks for in the other's cache."""
    num_ranks: int = 1
    """Of a stage of the asking engine: its ranks read parts of pages, of which checksums are made, where it has others
    than we."""


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """Blocks that are written, in order and without gaps from index `first` on. May be empty."""

    key: str
    first: int
    hashes: list[bytes]
    block_ids: list[list[int | None]]
    """Of each block one id a KV group; None where the block lies behind the group's window."""
    checksums: list[list[int | None]] | None
    """The same for checksums; None where they are switched off."""
    is_complete: bool
    """Nothing follows."""


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag="withdrawn"):
    """The blocks are not kept any more."""

    key: str
    reason: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """These are still wanted: their leases begin anew."""

    keys: list[str]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The answer to a heartbeat."""

    unknown: list[str]
    """Keys that nobody has brought here (yet)."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Nothing more will be read under the key; so many blocks were."""

    key: str
    num_blocks: int


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """The answer to `Done`: whether the blocks had been kept until then."""

    key: str
    was_kept: bool


class KeptBy(msgspec.Struct, frozen=True, array_like=True, tag="kept_by"):
    """From another data-parallel rank of the same engine: it keeps the blocks, so whoever asks here is to ask there."""

    key: str
    port: int
    """Of its side channel, on the same host."""


class Elsewhere(msgspec.Struct, frozen=True, array_like=True, tag="elsewhere"):
    """The answer to a claim of what another data-parallel rank of this engine keeps."""

    key: str
    port: int
    """Of that one's side channel, on the same host."""


FromPuller = GetMeta | Claim | Heartbeat | Done | KeptBy
FromKeeper = Meta | Blocks | Withdrawn | Beat | Released | Elsewhere
