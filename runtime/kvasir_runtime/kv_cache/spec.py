"""What each layer keeps in the KV cache, and how layers share pages: KV groups.

Layers that see equally far back form a group with one block table; a page holds one block of all layers of its group.
All pages have the same number of bytes, so one pool serves every group, and a page is contiguous for copies. A new
kind of KV (latent, quantised) is a `KvSpec` and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_PADDING = 0.1
"""Share of a group's bytes that may lie idle, before groups of fewer layers are preferred."""
ALIGNMENT_BYTES = 64
QUANTISED_TYPES = {"int8_per_token_head": "int8", "fp8_per_token_head": "float8_e4m3fn"}
"""Element types of quantised caches, of one byte each, by their names in `--kv-cache-dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """One layer's KV."""

    kind: Literal["full", "window", "latent"]
    """full: keys and values of all tokens; window: of the last `window`; latent: one compressed vector a token."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Name of the element type, as torch spells it."""
    itemsize: int
    window: int | None = None
    """Keys that a token sees, itself included; None: all before it."""
    scale_bytes: int = 0
    """Of a quantised layer: of the float32 factor of one token's and head's key, and of its value; 0: not quantised."""
    num_copies: int = 1
    """Tensor ranks that keep these same heads."""

    @property
    def num_tensors(self) -> int:
        return 1 if self.kind == "latent" else 2

    @property
    def head_parts(self) -> tuple[int, ...]:
        """Bytes of one token and head in each tensor of a layer's place in a page, each of which is
        [block_size, num_kv_heads, ...]: the scales of keys and of values, then keys and values."""
        scales = (self.scale_bytes,) * self.num_tensors if self.scale_bytes else ()
        return scales + (self.head_dim * self.itemsize,) * self.num_tensors

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * sum(self.head_parts)

    def as_cached(self, kv_cache_dtype: str) -> "KvSpec":
        """The layer's KV in a cache of this type; `auto`: as it is."""
        if kv_cache_dtype == "auto":
            return self
        return replace(self, dtype=QUANTISED_TYPES[kv_cache_dtype], itemsize=1, scale_bytes=4)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's KV lies in its group's pages."""

    group: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    block_size: int
    page_bytes: int
    groups: tuple[KvGroup, ...]
    places: tuple[LayerPlace, ...]
    """One a layer; of a pipeline stage, of its own."""


def make_layout(specs: Sequence[KvSpec], block_size: int, order: Sequence[int] | None = None) -> KvLayout:
    """Pack layers into groups of equal pages.

    With one reach there is one group. With several, the page is as large as the largest run of the smallest reach's
    layers that leaves at most `MAX_PADDING` of the pages idle (or as little as possible). Layers that follow each other
    in `order` (None: their own) come into one group.
    """
    reaches: dict[int | None, list[int]] = {}
    for layer in range(len(specs)) if order is None else order:
        reaches.setdefault(specs[layer].window, []).append(layer)
    sizes = [_aligned(spec.token_bytes * block_size) for spec in specs]
    page_bytes = _page_bytes([[sizes[layer] for layer in layers] for layers in reaches.values()])
    groups: list[KvGroup] = []
    places: dict[int, LayerPlace] = {}
    for window, layers in reaches.items():
        for members in _runs(layers, sizes, page_bytes):
            offset = 0
            for layer in members:
                places[layer] = LayerPlace(len(groups), offset)
                offset += sizes[layer]
            groups.append(KvGroup(tuple(members), window))
    return KvLayout(block_size, page_bytes, tuple(groups), tuple(places[layer] for layer in range(len(specs))))


def stage_layout(specs: Sequence[KvSpec], block_size: int, stages: Sequence[Sequence[int]], index: int) -> KvLayout:
    """The part of pipeline stage `index` in a layout of all layers, whose numbers by stage are `stages`.

    Groups and so block tables are those of all layers, and the same on all stages; the stage's pages hold its own
    layers alone. Groups take layers from all stages by turns, else a stage without one of a group had idle pages.
    """
    longest = max(len(layers) for layers in stages)
    order = [layers[place] for place in range(longest) for layers in stages if place < len(layers)]
    groups = make_layout(specs, block_size, order).groups
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return _stacked(block_size, groups, [(numbers[layer], specs[layer]) for layer in stages[index]])


def resized_layout(layout: KvLayout, specs: Sequence[KvSpec]) -> KvLayout:
    """The same layers in the same groups, with other sizes."""
    numbers = [place.group for place in layout.places]
    return _stacked(layout.block_size, layout.groups, list(zip(numbers, specs, strict=True)))


def _stacked(block_size: int, groups: tuple[KvGroup, ...], layers: Sequence[tuple[int, KvSpec]]) -> KvLayout:
    """Layers, each with the number of its group, behind one another in their groups' pages."""
    ends = [0] * len(groups)
    places: list[LayerPlace] = []
    for group, spec in layers:
        places.append(LayerPlace(group, ends[group]))
        ends[group] += _aligned(spec.token_bytes * block_size)
    return KvLayout(block_size, max(ends), groups, tuple(places))


def _page_bytes(reaches: list[list[int]]) -> int:
    """The page for layers of these sizes, reach by reach."""
    if len(reaches) == 1:
        return sum(reaches[0])
    smallest = min(reaches, key=sum)
    largest_layer = max(size for sizes in reaches for size in sizes)
    total = sum(size for sizes in reaches for size in sizes)
    candidates = sorted({max(largest_layer, sum(smallest[:count])) for count in range(1, len(smallest) + 1)})
    padding = {page: _num_pages(reaches, page) * page / total - 1 for page in candidates}
    close = [page for page in candidates if padding[page] <= MAX_PADDING]
    return max(close) if close else min(candidates, key=lambda page: (padding[page], -page))


def _num_pages(reaches: list[list[int]], page_bytes: int) -> int:
    return sum(len(_runs(list(range(len(sizes))), sizes, page_bytes)) for sizes in reaches)


def _runs(layers: list[int], sizes: Sequence[int], page_bytes: int) -> list[list[int]]:
    """Consecutive layers that fit into a page together."""
    runs: list[list[int]] = []
    left = 0
    for layer in layers:
        if sizes[layer] > left or not runs:
            runs.append([])
            left = page_bytes
        runs[-1].append(layer)
        left -= sizes[layer]
    return runs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def num_tokens_in(num_blocks: int, block_size: int, num_groups: int) -> int:
    """That so many blocks have room for; a token takes a place in a block of each group."""
    return num_blocks * block_size // num_groups
