"""A draw after every position of a step, in two or three Triton launches; the twin is `execution/sampler.py`.

1. The largest logit of each position, which is the token of a greedy row, and for top_k the least that its k tokens can
   be worth: the k-th largest of the maxima of small chunks.
2. Only for rows with top_p and no top_k: a histogram of weights, and its bin in which top_p cuts.
3. The few tokens that top_k and top_p may cut are collected, the cut among them is found, and the token is drawn.

In each, many programs look at blocks of a position, and the last that is done goes on alone. Weights are summed up as
integers, so neither the order of the programs nor the rest of the batch shows in the tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.argmax_triton import column_of_key
from kvasir_runtime.kernels.dependent_launch_triton import let_next_start, wait_for_previous
from kvasir_runtime.kernels.draw import FIXED_POINT
from kvasir_runtime.kernels.launches import Launcher
from kvasir_runtime.kernels.philox_triton import uniform
from kvasir_runtime.kernels.sample import PositionTensors, SamplingTensors

_BLOCK = 2048
"""Logits that a program looks at."""
_CHUNK = 64
_CAPACITY = 2048
"""Tokens of a position that may be collected. Where there are more (a top_k of over a thousand, equal logits), one
program searches them all, which is slow."""
_BINS = tl.constexpr(2048)
"""Of scaled logits, 64 a unit: a power of two, so that none is rounded into a neighbour."""
_SCALE = tl.constexpr(FIXED_POINT)
_NO_WEIGHT = tl.constexpr(-27.75)
"""Scaled logits below it weigh nothing in fixed point."""
_INFINITY = tl.constexpr(0x7F800000)
"""Its bits."""
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_KEY_BITS = tl.constexpr(32)
_BOUND_BITS = tl.constexpr(16)
_LOWER_BITS = tl.constexpr(2**16 - 1)
"""Where a bound will do, only the others of a key are looked for."""
_FEW = tl.constexpr(256)
"""Candidates that are cut by larger digits of their keys, which takes half the time."""


@dataclass(frozen=True, slots=True)
class _Workspace:
    """By position, n of them."""

    block_keys: Tensor  # int64 [n, num_blocks]
    chunk_maxima: Tensor  # float32 [n, num_chunks]
    bounds: Tensor  # float32 [n, 2]: the largest logit, and the least scaled one that may be drawn
    histograms: Tensor  # int64 [n, _BINS], 0 between calls
    nuclei: Tensor  # int64 [n, 2]: the bin that top_p cuts, and what is wanted of it
    candidates: Tensor  # int64 [n, _CAPACITY]: the key above the column
    sums: Tensor  # int64 [n, num_blocks], weights
    counters: Tensor  # int32 [n, 2]: programs that are done, and candidates; 0 between calls


class TritonSample:
    """Draws as `Sample` says from logits that are adjusted already, but for the mask. Owns what its launches hand on,
    so calls follow each other on one stream."""

    def __init__(self) -> None:
        self._workspace: _Workspace | None = None

    def __call__(self, logits: Tensor, positions: PositionTensors, tensors: SamplingTensors) -> Tensor:
        count, vocab_size = logits.shape
        num_blocks = triton.cdiv(vocab_size, _BLOCK)
        own = self._fitting(count, num_blocks, logits.device)
        token_ids = torch.empty(count, dtype=torch.int64, device=logits.device)
        mask, mask_stride = (tensors.top_k, 0) if positions.mask is None else (positions.mask, positions.mask.stride(0))
        read = (logits, logits.stride(0), vocab_size, mask, mask_stride, positions.rows)
        grid, padded = (count, num_blocks), triton.next_power_of_2(num_blocks)
        _launch_find_largest(
            grid,
            token_ids, own.bounds, own.block_keys, own.chunk_maxima, own.counters, *read,
            tensors.inverse_temperature, tensors.log_min_p, tensors.top_k,
            NUM_BLOCKS=padded, BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip
        if positions.has_nucleus:
            _launch_find_nucleus(
                grid,
                own.nuclei, own.histograms, own.bounds, own.counters, *read,
                tensors.inverse_temperature, tensors.top_k, tensors.top_p, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
        if positions.is_random:
            _launch_draw(
                grid,
                token_ids, own.bounds, own.nuclei, own.candidates, own.sums, own.counters, *read, positions.after,
                tensors.inverse_temperature, tensors.top_k, tensors.top_p, tensors.seeds,
                CAPACITY=_CAPACITY, NUM_BLOCKS=padded, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
        return token_ids

    def _fitting(self, count: int, num_blocks: int, device: torch.device) -> _Workspace:
        own = self._workspace
        if own is not None and own.block_keys.shape[0] >= count and own.block_keys.shape[1] == num_blocks:
            return own

        def longs(*shape: int) -> Tensor:
            return torch.zeros((count, *shape), dtype=torch.int64, device=device)

        self._workspace = own = _Workspace(
            block_keys=longs(num_blocks),
            chunk_maxima=torch.zeros((count, num_blocks * _BLOCK // _CHUNK), device=device),
            bounds=torch.zeros((count, 2), device=device),
            histograms=longs(_BINS.value),
            nuclei=longs(2),
            candidates=longs(_CAPACITY),
            sums=longs(num_blocks),
            counters=torch.zeros((count, 2), dtype=torch.int32, device=device),
        )
        return own


_OF_ANY_STEP = {"do_not_specialize": ["mask_stride"], "do_not_specialize_on_alignment": ["mask"]}
"""So that the first mask compiles nothing."""


@triton.jit(**_OF_ANY_STEP)
def _find_largest_kernel(
    token_ids, bounds, block_keys, chunk_maxima, counters, logits, row_stride, vocab_size, mask, mask_stride, rows,
    inverse_temperature, log_min_p, top_k, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (position, block). Finds `bounds`, and the most likely token."""
    wait_for_previous()
    let_next_start()
    position, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks, chunks = tl.num_programs(1), tl.arange(0, BLOCK // CHUNK)
    row = tl.load(rows + position)
    wanted, inverse = tl.load(top_k + row), tl.load(inverse_temperature + row)
    has_top_k = (wanted < vocab_size) & (inverse > 0)
    num_chunks = num_blocks * (BLOCK // CHUNK)
    chunk_maxima, block_keys = chunk_maxima + position * num_chunks, block_keys + position * num_blocks

    column = block * BLOCK + chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logit = _read(logits, row_stride, vocab_size, mask, mask_stride, position, column)
    if has_top_k:
        tl.store(chunk_maxima + block * (BLOCK // CHUNK) + chunks, tl.max(logit, 1))
    ordered = _mirrored((logit + 0.0).to(tl.int32, bitcast=True))  # -0 becomes +0, since the two are equal
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    tl.store(block_keys + block, tl.max(tl.max(key, 1), 0))
    tl.debug_barrier()  # what is stored by whichever thread is there before another counts it
    if tl.atomic_add(counters + position * 2, 1) == num_blocks - 1:
        tl.store(counters + position * 2, 0)
        blocks = tl.arange(0, NUM_BLOCKS)
        no_key = -0x8000000000000000
        best = tl.max(tl.load(block_keys + blocks, blocks < num_blocks, no_key, cache_modifier=".cg"), 0)
        tl.store(token_ids + position, column_of_key(best))
        largest = _mirrored((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        largest = tl.where(largest > float("-inf"), largest, 0.0)  # of no tokens none has a weight
        least = tl.maximum(tl.load(log_min_p + row), _NO_WEIGHT)
        if has_top_k:
            chunk = tl.arange(0, NUM_BLOCKS * (BLOCK // CHUNK))
            inside = chunk < num_chunks
            maximum = tl.load(chunk_maxima + chunk, inside, float("-inf"), cache_modifier=".cg")
            found = _find_cut(_key((maximum - largest) * inverse), inside.to(tl.int32), wanted, _BOUND_BITS, 1)
            least = tl.maximum(least, _scaled_of(found | _LOWER_BITS))
        tl.store(bounds + position * 2, largest)
        tl.store(bounds + position * 2 + 1, least)


@triton.jit(**_OF_ANY_STEP)
def _find_nucleus_kernel(
    nuclei, histograms, bounds, counters, logits, row_stride, vocab_size, mask, mask_stride, rows,
    inverse_temperature, top_k, top_p, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (position, block). Finds `nuclei` of rows with top_p alone."""
    wait_for_previous()
    let_next_start()
    position, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + position)
    inverse, share = tl.load(inverse_temperature + row), tl.load(top_p + row)
    if (inverse > 0) & (tl.load(top_k + row) >= vocab_size) & (share < 1.0):
        largest, least = tl.load(bounds + position * 2), tl.load(bounds + position * 2 + 1)
        histogram, bins = histograms + position * _BINS, tl.arange(0, _BINS)
        column = block * BLOCK + tl.arange(0, BLOCK)
        logit = _read(logits, row_stride, vocab_size, mask, mask_stride, position, column)
        scaled = (logit - largest) * inverse
        weight = tl.where(scaled >= least, tl.exp(scaled), 0.0)
        amount = (weight * _SCALE).to(tl.int64)
        # All tokens this unlikely weigh less than what top_p leaves out: the cut lies above them, and one sum of them
        # will do.
        is_tail = weight < 0.5 * (1.0 - share) / vocab_size
        tail = tl.sum(tl.where(is_tail, amount, 0), 0)
        tl.atomic_add(histogram + _BINS - 1, tail, tail > 0, "relaxed")
        tl.atomic_add(histogram + _bin(scaled), amount, (amount > 0) & (is_tail == 0), "relaxed")
        tl.debug_barrier()  # the block is added by all threads before one counts it
        if tl.atomic_add(counters + position * 2, 1) == tl.num_programs(1) - 1:
            tl.store(counters + position * 2, 0)
            own = tl.load(histogram + bins, cache_modifier=".cg")
            tl.store(histogram + bins, tl.zeros([_BINS], tl.int64))
            wanted, upto = _part_of(tl.sum(own, 0), share), tl.cumsum(own, 0)
            before = upto < wanted
            tl.store(nuclei + position * 2, tl.sum(before.to(tl.int32), 0).to(tl.int64))
            tl.store(nuclei + position * 2 + 1, wanted - tl.sum(tl.where(before, own, 0), 0))


@triton.jit(**_OF_ANY_STEP)
def _draw_kernel(
    token_ids, bounds, nuclei, candidates, sums, counters, logits, row_stride, vocab_size, mask, mask_stride, rows,
    after, inverse_temperature, top_k, top_p, seeds,
    CAPACITY: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (position, block). Draws the tokens of random rows.

    A block's tokens that are kept for certain are summed up, those that may be are collected.
    """
    wait_for_previous()
    let_next_start()
    position, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    row = tl.load(rows + position)
    inverse, wanted, share = tl.load(inverse_temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    has_top_k, has_top_p = wanted < vocab_size, share < 1.0
    if inverse > 0:
        largest, least = tl.load(bounds + position * 2), tl.load(bounds + position * 2 + 1)
        candidates, sums = candidates + position * CAPACITY, sums + position * num_blocks
        num_candidates = counters + position * 2 + 1
        column = block * BLOCK + tl.arange(0, BLOCK)
        logit = _read(logits, row_stride, vocab_size, mask, mask_stride, position, column)
        scaled = (logit - largest) * inverse
        amount = tl.zeros([BLOCK], tl.int64)
        if has_top_k == 0:
            amount = _amounts(scaled, least)
        if has_top_k | has_top_p:
            is_candidate = scaled >= least
            if has_top_k == 0:
                own_bin, cut_bin = _bin(scaled), tl.load(nuclei + position * 2).to(tl.int32)
                is_candidate &= own_bin == cut_bin
                amount = tl.where(own_bin < cut_bin, amount, 0)
            count = tl.sum(is_candidate.to(tl.int32), 0)
            if count > 0:
                first = tl.atomic_add(num_candidates, count, sem="relaxed")
                place = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
                packed = (_key(scaled).to(tl.int64) << 32) | column.to(tl.int64)
                tl.store(candidates + place, packed, is_candidate & (place < CAPACITY))
        tl.store(sums + block, tl.sum(amount, 0))
        tl.debug_barrier()  # what is stored by whichever thread is there before another counts it
        if tl.atomic_add(counters + position * 2, 1) == num_blocks - 1:
            tl.store(counters + position * 2, 0)
            if has_top_k | has_top_p:
                count = tl.atomic_xchg(num_candidates, 0)
                needed = tl.load(nuclei + position * 2 + 1)
                if count <= _FEW:
                    cut = _cut_candidates(
                        sums, candidates, count, least, wanted, has_top_k, share, has_top_p, needed, BLOCK, _FEW, 2
                    )
                elif count <= CAPACITY:
                    cut = _cut_candidates(
                        sums, candidates, count, least, wanted, has_top_k, share, has_top_p, needed, BLOCK, CAPACITY, 1
                    )
                else:
                    cut = _INFINITY
                    if has_top_k:
                        cut = _search_all(
                            logits, row_stride, vocab_size, mask, mask_stride, position, largest, inverse, least, cut,
                            wanted.to(tl.int64), BLOCK, COUNTS=True,
                        )  # fmt: skip
                    if has_top_p:
                        total = _sum_all(
                            sums, logits, row_stride, vocab_size, mask, mask_stride, position, largest, inverse,
                            tl.maximum(least, _scaled_of(cut)), BLOCK,
                        )  # fmt: skip
                        cut = _search_all(
                            logits, row_stride, vocab_size, mask, mask_stride, position, largest, inverse, least, cut,
                            _part_of(total, share), BLOCK, COUNTS=False,
                        )  # fmt: skip
                    _sum_all(
                        sums, logits, row_stride, vocab_size, mask, mask_stride, position, largest, inverse,
                        tl.maximum(least, _scaled_of(cut)), BLOCK,
                    )  # fmt: skip
                least = tl.maximum(least, _scaled_of(cut))
                tl.debug_barrier()  # all threads have added to the sums before one reads them

            blocks = tl.arange(0, NUM_BLOCKS)
            own = tl.load(sums + blocks, blocks < num_blocks, 0, cache_modifier=".cg")
            total, upto = tl.sum(own, 0), tl.cumsum(own, 0)
            number = uniform(tl.load(seeds + row), tl.load(after + position) + 1)
            target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
            chosen = tl.sum((upto <= target).to(tl.int32), 0)
            target -= tl.sum(tl.where(blocks < chosen, own, 0), 0)
            column = chosen * BLOCK + tl.arange(0, BLOCK)
            logit = _read(logits, row_stride, vocab_size, mask, mask_stride, position, column)
            inner = tl.cumsum(_amounts((logit - largest) * inverse, least), 0)
            token_id = chosen * BLOCK + tl.sum((inner <= target).to(tl.int32), 0)
            tl.store(token_ids + position, tl.where(total > 0, token_id, 0).to(tl.int64))


@triton.jit
def _read(logits, row_stride, vocab_size, mask, mask_stride, position, column):
    """A position's logits at these columns; NaN and what may not be drawn are -inf, infinity is the largest number."""
    inside = column < vocab_size
    logit = tl.load(logits + position * row_stride + column, inside, float("-inf")).to(tl.float32)
    if mask_stride > 0:
        allowed = tl.load(mask + position * mask_stride + column // 32, inside, 0)
        logit = tl.where(((allowed >> (column % 32)) & 1) != 0, logit, float("-inf"))
    return tl.where(logit == logit, tl.minimum(logit, _LARGEST), float("-inf"))


@triton.jit
def _mirrored(bits):
    """Integers in the order of the floats with these bits, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(scaled):
    """A number of 31 bits that grows as the scaled logit, which is not above 0, falls; NaN is as -inf."""
    return tl.minimum(tl.abs(scaled).to(tl.int32, bitcast=True), _INFINITY)


@triton.jit
def _scaled_of(key):
    return -tl.minimum(key, _INFINITY).to(tl.float32, bitcast=True)


@triton.jit
def _bin(scaled):
    return tl.where(scaled > -32.0, -scaled * 64.0, 2047.0).to(tl.int32)


@triton.jit
def _amounts(scaled, least):
    """Weights in fixed point, of those below `least` nothing."""
    return (tl.where(scaled >= least, tl.exp(scaled), 0.0) * _SCALE).to(tl.int64)


@triton.jit
def _part_of(total, share):
    return tl.ceil(total.to(tl.float64) * share.to(tl.float64)).to(tl.int64)


@triton.jit
def _cut_candidates(
    sums, candidates, count, least, wanted, has_top_k, share, has_top_p, needed,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """The last key that top_k and top_p keep; what is kept is added to the sums of its blocks."""
    slots = tl.arange(0, CAPACITY)
    collected = tl.load(candidates + slots, slots < count, 0, cache_modifier=".cg")
    key = (collected >> 32).to(tl.int32)
    weight = tl.where(slots < count, _amounts(_scaled_of(key), least), 0)
    cut = _INFINITY
    if has_top_k:
        cut = _find_cut(key, (slots < count).to(tl.int32), wanted, _KEY_BITS, DIGIT)
        weight = tl.where(key <= cut, weight, 0)
    if has_top_p:
        if has_top_k:
            needed = _part_of(tl.sum(weight, 0), share)
        cut = tl.minimum(cut, _find_cut(key, weight, needed, _KEY_BITS, DIGIT))
    tl.atomic_add(sums + (collected & 0x7FFFFFFF) // BLOCK, weight, (key <= cut) & (weight > 0), "relaxed")
    return cut


@triton.jit
def _find_cut(key, amount, wanted, NUM_BITS: tl.constexpr, DIGIT: tl.constexpr):
    """The largest key before which there is less than `wanted`, by its upper bits of 32; the lower ones are 0."""
    key, found = key.to(tl.uint32), tl.zeros([], tl.uint32)
    for place in range(NUM_BITS // DIGIT):
        shift = 32 - DIGIT - DIGIT * place
        if DIGIT == 1:
            tried = found + (tl.full([], 1, tl.uint32) << shift)
            found = tl.where(tl.sum(tl.where(key < tried, amount, 0), 0) < wanted, tried, found)
        else:
            tried = found + (tl.arange(0, 2**DIGIT).to(tl.uint32) << shift)
            below = tl.sum(tl.where(key[:, None] < tried[None, :], amount[:, None], 0), 0)
            found += (tl.sum((below < wanted).to(tl.uint32), 0) - 1) << shift
    return tl.minimum(found, _INFINITY).to(tl.int32)


@triton.jit
def _search_all(
    logits, row_stride, vocab_size, mask, mask_stride, position, largest, inverse, least, cut, wanted,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """As `_find_cut`, among all tokens of a position whose keys are not above `cut`."""
    least = tl.maximum(least, _scaled_of(cut))
    found = 0
    for bit in range(31):
        tried = found | (1 << (30 - bit))
        below = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = _read(logits, row_stride, vocab_size, mask, mask_stride, position, column)
            scaled = (logit - largest) * inverse
            if COUNTS:
                amount = (scaled >= least).to(tl.int64)
            else:
                amount = _amounts(scaled, least)
            below += tl.where(_key(scaled) < tried, amount, 0)
        found = tl.where(tl.sum(below, 0) < wanted, tried, found)
    return found


@triton.jit
def _sum_all(
    sums, logits, row_stride, vocab_size, mask, mask_stride, position, largest, inverse, least, BLOCK: tl.constexpr
):
    """Store the sums of all blocks of a position, and return the total."""
    total = tl.zeros([], tl.int64)
    for block in range(tl.num_programs(1)):
        column = block * BLOCK + tl.arange(0, BLOCK)
        logit = _read(logits, row_stride, vocab_size, mask, mask_stride, position, column)
        own = tl.sum(_amounts((logit - largest) * inverse, least), 0)
        tl.store(sums + block, own)
        total += own
    return total


_launch_find_largest = Launcher(_find_largest_kernel, starts_early=True)
_launch_find_nucleus = Launcher(_find_nucleus_kernel, starts_early=True)
_launch_draw = Launcher(_draw_kernel, starts_early=True)
