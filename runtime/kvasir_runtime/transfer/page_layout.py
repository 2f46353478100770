"""Which bytes of a peer's page go where in ours, when the two engines split the heads among different numbers of ranks.

Both cut the layers into the same pipeline stages, and a rank has to do with the ranks of its own stage alone.
A page holds, layer by layer, the keys of a block's tokens and then their values, each [block_size, num_kv_heads,
head_dim] with the heads of one rank, behind the scales of both where they are quantised. With equally many ranks a page
is one run of bytes; with others each token's heads lie apart on one of the sides. Pure arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec, resized_layout
from kvasir_runtime.parallel.stage import WHOLE, Stage
from kvasir_runtime.transfer.messages import Region


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A rank among those that split the heads."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes within a page of theirs that belong into a page of ours."""

    ours: int
    theirs: int
    num_bytes: int

    @property
    def swapped(self) -> "Segment":
        """As the other side sees it."""
        return Segment(self.theirs, self.ours, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """What a page of ours has in common with the page that one rank of the other engine keeps of the same block."""

    rank: int
    """Theirs."""
    segments: list[Segment] | None
    """None: all of both pages."""


class PageParts:
    """Of one rank's pages, by the number of ranks that a stage of the other engine has."""

    def __init__(self, specs: Sequence[KvSpec], layout: KvLayout, place: TensorPlace, stage: Stage = WHOLE) -> None:
        """`specs` and `layout` are those of this rank, and `place` is among the ranks of its stage."""
        self._specs = whole_specs(specs, place.size)
        self._own_layout = layout
        self.place = place
        self.stage = stage
        self._made: dict[tuple[int, int, bool], list[Part]] = {}

    def to_read(self, group: int, num_ranks: int) -> list[Part]:
        """What we read, from the fewest ranks that have all of it."""
        return self._parts(group, num_ranks, is_reading=True)

    def to_be_read(self, group: int, num_ranks: int) -> list[Part]:
        """What is read from us."""
        return self._parts(group, num_ranks, is_reading=False)

    def of_stage(self, regions: Sequence[Region]) -> Sequence[Region]:
        """Of all regions of an engine those of the stage that keeps our layers."""
        num_ranks = len(regions) // self.stage.num_stages
        return regions[self.stage.index * num_ranks : (self.stage.index + 1) * num_ranks]

    def sources(self, num_ranks: int) -> list[int]:
        """Ranks of theirs that we read from, in any group."""
        if num_ranks == self.place.size:
            return [self.place.rank]
        return sorted({rank for spec in self._specs for rank in sources(self.place, num_ranks, spec.num_kv_heads)})

    def _parts(self, group: int, num_ranks: int, *, is_reading: bool) -> list[Part]:
        if num_ranks == self.place.size:
            return [Part(self.place.rank, None)]
        key = group, num_ranks, is_reading
        if key not in self._made:
            of_each = [
                (rank, self._segments(group, TensorPlace(rank, num_ranks), is_reading)) for rank in range(num_ranks)
            ]
            self._made[key] = [Part(rank, common) for rank, common in of_each if common]
        return self._made[key]

    def _segments(self, group: int, theirs: TensorPlace, is_reading: bool) -> list[Segment]:
        reader, writer = (self.place, theirs) if is_reading else (theirs, self.place)
        layouts = self._layout(reader), self._layout(writer)
        found = segments(self._specs, layouts, group, (reader, writer))
        return found if is_reading else [segment.swapped for segment in found]

    def _layout(self, place: TensorPlace) -> KvLayout:
        specs = [replace(spec, num_kv_heads=len(heads_of(place, spec.num_kv_heads))) for spec in self._specs]
        return resized_layout(self._own_layout, specs)


def whole_specs(specs: Sequence[KvSpec], num_ranks: int) -> list[KvSpec]:
    """With the heads of all ranks, of which each keeps `specs`."""
    return [
        replace(spec, num_kv_heads=spec.num_kv_heads * num_ranks // spec.num_copies, num_copies=1) for spec in specs
    ]


def bytes_on_all_ranks(page_bytes: int, specs: Sequence[KvSpec], num_ranks: int) -> int:
    """Of a page, with heads that several ranks keep alike counted once. `specs`: of one rank."""
    on_all = sum(spec.token_bytes * num_ranks // spec.num_copies for spec in specs)
    return page_bytes * on_all // sum(spec.token_bytes for spec in specs)


def heads_of(place: TensorPlace, num_heads: int) -> range:
    """The KV heads of the model that a rank keeps: its share, or one that several ranks keep alike."""
    if place.size <= num_heads:
        share = num_heads // place.size
        return range(place.rank * share, (place.rank + 1) * share)
    head = place.rank * num_heads // place.size
    return range(head, head + 1)


def sources(ours: TensorPlace, num_ranks: int, num_heads: int) -> list[int]:
    """The fewest of the other side's ranks that together keep all heads of one of ours."""
    if num_ranks == ours.size:
        return [ours.rank]
    wanted = heads_of(ours, num_heads)
    ranks: list[int] = []
    have: set[int] = set()
    for rank in range(num_ranks):
        new = set(heads_of(TensorPlace(rank, num_ranks), num_heads)) & set(wanted) - have
        if new:
            ranks.append(rank)
            have |= new
    return ranks


def segments(
    specs: Sequence[KvSpec], layouts: tuple[KvLayout, KvLayout], group: int, places: tuple[TensorPlace, TensorPlace]
) -> list[Segment]:
    """Of a page of the KV group: what a rank of ours takes from a rank of theirs.

    `specs` have the heads of all ranks of the stage; `layouts` and `places` are ours, then theirs.
    """
    if places[0].size == places[1].size:
        return [Segment(0, 0, layouts[0].page_bytes)]
    return _joined(
        segment
        for spec, ours, theirs in zip(specs, layouts[0].places, layouts[1].places, strict=True)
        if ours.group == group
        for segment in _layer_segments(spec, layouts[0].block_size, (ours.offset_bytes, theirs.offset_bytes), places)
    )


def _layer_segments(
    spec: KvSpec, block_size: int, offsets: tuple[int, int], places: tuple[TensorPlace, TensorPlace]
) -> Iterator[Segment]:
    ours, theirs = (heads_of(place, spec.num_kv_heads) for place in places)
    common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    if places[1].rank not in sources(places[0], places[1].size, spec.num_kv_heads):
        return
    our_start, their_start = offsets
    for head_bytes in spec.head_parts:
        for token in range(block_size):
            yield Segment(
                our_start + (token * len(ours) + common.start - ours.start) * head_bytes,
                their_start + (token * len(theirs) + common.start - theirs.start) * head_bytes,
                len(common) * head_bytes,
            )
        our_start += block_size * len(ours) * head_bytes
        their_start += block_size * len(theirs) * head_bytes


def _joined(parts: Iterator[Segment]) -> list[Segment]:
    """Runs that go on where the one before ended, on both sides, are one."""
    joined: list[Segment] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and (last.ours + last.num_bytes, last.theirs + last.num_bytes) == (part.ours, part.theirs):
            joined[-1] = Segment(last.ours, last.theirs, last.num_bytes + part.num_bytes)
        else:
            joined.append(part)
    return joined


WHOLE_PAGES = PageParts((), KvLayout(0, 0, (), ()), TensorPlace(0, 1))
"""Between engines of one rank each."""
