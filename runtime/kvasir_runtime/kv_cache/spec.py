"""What layers keep in the KV cache, and how they share pages: KV groups.

A layer declares what it keeps as a list of specs: mostly one, none where it reads another layer's. Specs of one reach
form groups with one block table each; a page holds one block of all specs of its group. All pages have the same number
of bytes, so one pool serves every group, and a page is contiguous for copies. A new content (latent, quantised) is a
`KvSpec`, and a new rule of what is seen a `Reach`, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_PADDING = 0.1
"""Share of a group's bytes that may lie idle, before groups of fewer layers are preferred."""
ALIGNMENT_BYTES = 64
QUANTISED_TYPES = {"int8_per_token_head": "int8", "fp8_per_token_head": "float8_e4m3fn"}
"""Element types of quantised caches, of one byte each, by their names in `--kv-cache-dtype`."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which positions a token sees: itself and all before it (full), the last `size` of them (window), or those in its
    own run of `size` positions (chunk). What a later token sees never begins earlier."""

    kind: Literal["full", "window", "chunk"] = "full"
    size: int | None = None
    """None: full."""

    @classmethod
    def window(cls, size: int) -> "Reach":
        return cls("window", size)

    @classmethod
    def chunk(cls, size: int) -> "Reach":
        return cls("chunk", size)

    @property
    def is_full(self) -> bool:
        return self.size is None

    def first_seen(self, position: int) -> int:
        """The first position that the token at this one sees."""
        if self.size is None:
            return 0
        return max(0, position - self.size + 1) if self.kind == "window" else position // self.size * self.size

    def most_blocks(self, num_blocks: int, most_at_once: int, block_size: int) -> int:
        """That a sequence of `num_blocks` holds at once while it is computed `most_at_once` tokens at a time: no more
        than what is seen and a step's tokens touch, wherever in a block they begin."""
        if self.size is None:
            return num_blocks
        return min(num_blocks, -(-(self.size + most_at_once) // block_size) + 1)


FULL = Reach()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """What is kept of each token: keys and values, or one vector for both."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    """0: the keys are the values as well (latent)."""
    dtype: str
    """Name of the element type, as torch spells it."""
    itemsize: int
    reach: Reach = FULL
    scale_bytes: int = 0
    """Of a quantised layer: of the float32 factor of one token's and head's key, and of its value; 0: not quantised."""
    num_copies: int = 1
    """Tensor ranks that keep these same heads."""

    @property
    def num_tensors(self) -> int:
        return 2 if self.value_dim else 1

    @property
    def head_parts(self) -> tuple[int, ...]:
        """Bytes of one token and head in each tensor of its place in a page, each of which is
        [block_size, num_kv_heads, ...]: the scales of keys and of values, then keys and values."""
        scales = (self.scale_bytes,) * self.num_tensors if self.scale_bytes else ()
        return scales + tuple(dim * self.itemsize for dim in self.head_dims)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Of each tensor."""
        return (self.key_dim, self.value_dim)[: self.num_tensors]

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * sum(self.head_parts)

    def as_cached(self, kv_cache_dtype: str) -> "KvSpec":
        """The same in a cache of this type; `auto`: as it is."""
        if kv_cache_dtype == "auto":
            return self
        return replace(self, dtype=QUANTISED_TYPES[kv_cache_dtype], itemsize=1, scale_bytes=4)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Specs, by their places among all, that share a block table."""

    specs: tuple[int, ...]
    reach: Reach = FULL


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a spec's KV lies in its group's pages."""

    group: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    block_size: int
    page_bytes: int
    groups: tuple[KvGroup, ...]
    places: tuple[KvPlace, ...]
    """One a spec; of a pipeline stage, of its own."""


def make_layout(specs: Sequence[KvSpec], block_size: int, order: Sequence[int] | None = None) -> KvLayout:
    """Pack specs into groups of equal pages.

    With one reach there is one group. With several, the page is as large as the largest run of the smallest reach's
    specs that leaves at most `MAX_PADDING` of the pages idle (or as little as possible). Specs that follow each other
    in `order` (None: their own) come into one group, as many of one reach as their sizes let into a page.
    """
    reaches: dict[Reach, list[int]] = {}
    for index in range(len(specs)) if order is None else order:
        reaches.setdefault(specs[index].reach, []).append(index)
    sizes = [_aligned(spec.token_bytes * block_size) for spec in specs]
    page_bytes = _page_bytes([[sizes[index] for index in own] for own in reaches.values()])
    groups: list[KvGroup] = []
    places: dict[int, KvPlace] = {}
    for reach, own in reaches.items():
        for members in _runs(own, sizes, page_bytes):
            offset = 0
            for index in members:
                places[index] = KvPlace(len(groups), offset)
                offset += sizes[index]
            groups.append(KvGroup(tuple(members), reach))
    return KvLayout(block_size, page_bytes, tuple(groups), tuple(places[index] for index in range(len(specs))))


def stage_layout(specs: Sequence[KvSpec], block_size: int, stages: Sequence[Sequence[int]], index: int) -> KvLayout:
    """The part of pipeline stage `index` in a layout of all specs, whose numbers by stage are `stages`.

    Groups and so block tables are those of all specs, and the same on all stages; the stage's pages hold its own alone.
    Groups take specs from all stages by turns, else a stage without one of a group had idle pages.
    """
    longest = max(len(own) for own in stages)
    order = [own[place] for place in range(longest) for own in stages if place < len(own)]
    groups = make_layout(specs, block_size, order).groups
    numbers = {spec: number for number, group in enumerate(groups) for spec in group.specs}
    return _stacked(block_size, groups, [(numbers[spec], specs[spec]) for spec in stages[index]])


def resized_layout(layout: KvLayout, specs: Sequence[KvSpec]) -> KvLayout:
    """The same groups, with specs of other sizes."""
    numbers = [place.group for place in layout.places]
    return _stacked(layout.block_size, layout.groups, list(zip(numbers, specs, strict=True)))


def _stacked(block_size: int, groups: tuple[KvGroup, ...], specs: Sequence[tuple[int, KvSpec]]) -> KvLayout:
    """Specs, each with the number of its group, behind one another in their groups' pages."""
    ends = [0] * len(groups)
    places: list[KvPlace] = []
    for group, spec in specs:
        places.append(KvPlace(group, ends[group]))
        ends[group] += _aligned(spec.token_bytes * block_size)
    return KvLayout(block_size, max(ends), groups, tuple(places))


def _page_bytes(reaches: list[list[int]]) -> int:
    """The page for specs of these sizes, reach by reach."""
    if len(reaches) == 1:
        return sum(reaches[0])
    smallest = min(reaches, key=sum)
    largest = max(size for sizes in reaches for size in sizes)
    total = sum(size for sizes in reaches for size in sizes)
    candidates = sorted({max(largest, sum(smallest[:count])) for count in range(1, len(smallest) + 1)})
    padding = {page: _num_pages(reaches, page) * page / total - 1 for page in candidates}
    close = [page for page in candidates if padding[page] <= MAX_PADDING]
    return max(close) if close else min(candidates, key=lambda page: (padding[page], -page))


def _num_pages(reaches: list[list[int]], page_bytes: int) -> int:
    return sum(len(_runs(list(range(len(sizes))), sizes, page_bytes)) for sizes in reaches)


def _runs(specs: list[int], sizes: Sequence[int], page_bytes: int) -> list[list[int]]:
    """Consecutive specs that fit into a page together."""
    runs: list[list[int]] = []
    left = 0
    for spec in specs:
        if sizes[spec] > left or not runs:
            runs.append([])
            left = page_bytes
        runs[-1].append(spec)
        left -= sizes[spec]
    return runs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
