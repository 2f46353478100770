"""How the Triton attention kernels cut their work: tile shapes, splits of a decode's keys, the list of prefill tiles.

How a request is cut depends on the request and the device alone, never on its neighbours, so neither do its results.
Plain numbers and numpy: nothing is launched here.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Entry = TypeVar("Entry")

MIN_DOT = 16
"""Least edge of a Triton matrix product."""
SPLIT_UNIT_KEYS = 128
"""Fewer keys than this are not worth a split of their own. Up to a head_dim of 128, loads of this many are all under
way at once; each split leaves a row of float32 a query head, in groups of 8 already 6 % of the bytes that it
reads."""
SHORT_UNITS = 4
"""Units of a short sequence. On an H200, 64 of 1,024 keys take 93 us in units of 128, 86 in units of 256, eight 19 and
16, one 9 and 11."""
_LEAST_SPLITS, _MOST_SPLITS = 4, 64
_PROGRAMS_PER_SM = 32
"""Most decode programs launched a multiprocessor: an idle one costs about a nanosecond of the launch."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """One program's tile: rows (query tokens x heads of a group) by keys, and how it is run."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one kind of attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


_PREFILL = {
    2: {64: TileShape(128, 64, 8, 5), 128: TileShape(128, 64, 8, 5), 256: TileShape(64, 32, 4, 2)},
    4: {64: TileShape(64, 32, 8, 2), 128: TileShape(64, 16, 8, 2), 256: TileShape(32, 16, 8, 2)},
}
_LARGE_PREFILL, _LARGE_BYTES = TileShape(128, 64, 8, 3), 197 * 1024
"""Of 16 bits and a head_dim beyond 128, where a program may have so much shared memory."""
_DECODE = {
    2: {64: TileShape(MIN_DOT, 128, 4, 5), 128: TileShape(MIN_DOT, 64, 4, 5), 256: TileShape(MIN_DOT, 32, 4, 5)},
    4: {64: TileShape(MIN_DOT, 64, 4, 2), 128: TileShape(MIN_DOT, 32, 4, 2), 256: TileShape(MIN_DOT, 16, 4, 2)},
}
"""By the bytes of an element and head_dim, rounded up; tests/runtime/kernels/compiled_kernels.csv has what each needs.

Triton spaces the block table's entry, the keys and values at it, and their products evenly over the stages. From 2 to 4
the next tile's loads are issued only after this tile's have arrived: decodes, which keep one tile then, overlap
nothing. At 5 a tile more is kept and loads stay under way while a tile is multiplied; 7 would keep another, and a
multiprocessor of a Hopper would hold two decode programs instead of three. Prefills of a head_dim of 256 stay at two
tiles, since a third has no room. Float32 has no tensor cores: there, registers decide. Measured on an H100:
benchmarks/results/gpu-2026-11-27-tiles.md.
"""
_MOST_DECODE_ROWS = {2: {64: 128, 128: 128, 256: 32}, 4: {64: 64, 128: 64, 256: 32}}
"""Of one program: of more, the sums do not fit into registers, even of twice the warps."""


def prefill_tile(heads: HeadShape, itemsize: int, shared_bytes: int) -> TileShape:
    """As many rows as the table says, or one token's where a group is larger; a program may have so much shared
    memory."""
    shape = _of_size(_PREFILL, heads.head_dim, itemsize)
    if itemsize == 2 and heads.head_dim > 128 and shared_bytes >= _LARGE_BYTES:
        shape = _LARGE_PREFILL
    return replace(shape, num_rows=max(shape.num_rows, _power_of_2(heads.group)))


def decode_tile(heads: HeadShape, itemsize: int, max_decode_len: int) -> TileShape:
    """Rows for a request of up to `max_decode_len` tokens, however many it has this time; the most that a program can
    hold take twice the warps."""
    shape = _of_size(_DECODE, heads.head_dim, itemsize)
    most_rows = _of_size(_MOST_DECODE_ROWS, heads.head_dim, itemsize)
    num_rows = max(shape.num_rows, _power_of_2(max_decode_len * heads.group))
    if num_rows < most_rows:
        return replace(shape, num_rows=num_rows)
    return replace(shape, num_rows=most_rows, num_warps=2 * shape.num_warps)


def num_row_tiles(heads: HeadShape, tile: TileShape, max_decode_len: int) -> int:
    """Programs that share the rows of one (request, KV head)."""
    return -(-max_decode_len * heads.group // tile.num_rows)


@dataclass(frozen=True, slots=True)
class Splits:
    """How the keys of a decode are cut: into at most `max_splits`, each a multiple of `unit_keys` keys long."""

    max_splits: int  # a power of two
    unit_keys: int = SPLIT_UNIT_KEYS

    def count(self, num_keys: int) -> int:
        """Splits of so many keys, at least one; the kernels count alike. Those of longer sequences are twice as long at
        least: they have splits enough, and what each leaves behind is read again."""
        unit_keys = self.unit_keys if num_keys <= SHORT_UNITS * self.unit_keys else 2 * self.unit_keys
        split_keys = max(1, -(-num_keys // (self.max_splits * unit_keys))) * unit_keys
        return max(1, -(-num_keys // split_keys))

    def most(self, max_keys: int) -> int:
        """Splits of up to so many keys."""
        return max(self.count(min(max_keys, SHORT_UNITS * self.unit_keys)), self.count(max_keys))


def splits_for(num_kv_heads: int, num_sms: int, unit_keys: int = SPLIT_UNIT_KEYS) -> Splits:
    """Splits that let a single long decode fill the device twice over."""
    wanted = _power_of_2(2 * num_sms // num_kv_heads + 1) // 2
    return Splits(max(_LEAST_SPLITS, min(_MOST_SPLITS, wanted)), unit_keys)


def num_split_programs(splits: Splits, num_sharing: int, max_seq_len: int, num_sms: int) -> int:
    """Programs that take every n-th split each, where `num_sharing` (request, KV head, tile of rows) share the device:
    how many changes no result."""
    enough = -(-_PROGRAMS_PER_SM * num_sms // num_sharing)
    return max(1, min(enough, splits.most(max_seq_len)))


def workspace_floats(heads: HeadShape, num_tokens: int, num_sms: int) -> tuple[int, int]:
    """Numbers that the splits of so many decode tokens leave behind: (weighted values, softmax statistics)."""
    num_entries = num_tokens * heads.num_heads * splits_for(heads.num_kv_heads, num_sms).max_splits
    return num_entries * heads.head_dim, num_entries * 2


def prefill_tiles(query_lens: NDArray[np.int32], num_decodes: int, queries_per_tile: int) -> NDArray[np.int32]:
    """[num_tiles, 2]: request, and its first query token in the tile, for all requests after the decodes."""
    counts = -(-query_lens[num_decodes:] // queries_per_tile)
    requests = np.repeat(np.arange(num_decodes, len(query_lens)), counts)
    firsts = np.arange(len(requests)) - np.repeat(counts.cumsum() - counts, counts)
    tiles = np.stack([requests, firsts * queries_per_tile], axis=1).astype(np.int32)
    return tiles[::-1].copy()  # a prompt's last tile sees the most keys: it starts first


def _of_size(table: dict[int, dict[int, Entry]], head_dim: int, itemsize: int) -> Entry:
    """The table's entry. Raises ValueError beyond it."""
    sizes = table[2 if itemsize <= 2 else 4]
    for size, entry in sizes.items():
        if head_dim <= size:
            return entry
    raise ValueError(f"head_dim {head_dim}: the Triton attention kernels go up to {max(sizes)}; use reference")


def _power_of_2(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()
