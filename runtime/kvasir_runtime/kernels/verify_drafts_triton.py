"""Which drafts hold, in Triton: one launch for what was drawn, one for the most likely tokens and what holds of them.

The torch twins are `verify_drafts_reference` and, before it, `argmax_reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.argmax_triton import BLOCK, block_key, column_of_key
from kvasir_runtime.kernels.launches import Launcher
from kvasir_runtime.kernels.sample import DrawnPositions, KnownTokens, VerifiedTokens


def triton_verify_drafts(token_ids: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
    """As `verify_drafts_reference`."""
    num_sampled = drawn.rows.shape[0]
    verified = VerifiedTokens.empty(num_sampled, drawn.width, token_ids.device)
    _launch_verify_drafts(
        (num_sampled,),
        verified.packed, drawn.width, token_ids, drawn.positions, drawn.starts, drawn.rows, drawn.draws,
        known.token_ids, known.token_ids.stride(0), known.num_known, known.num_computed, known.drafts,
        known.drafts.stride(0), WIDTH=_padded_width(known), num_warps=1,
    )  # fmt: skip
    return verified


class TritonVerifyMostLikely:
    """As `argmax_reference` and then `verify_drafts_reference`. Owns counters, so calls follow each other on one
    stream."""

    def __init__(self) -> None:
        self._num_done: Tensor | None = None
        """int32 [num_rows], programs that are done with a sequence's logits; 0 between calls."""

    def __call__(self, logits: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
        num_sampled, (num_positions, vocab_size) = drawn.rows.shape[0], logits.shape
        num_rows, num_blocks = known.num_known.shape[0], triton.cdiv(vocab_size, BLOCK)
        if self._num_done is None or self._num_done.shape[0] < num_rows:
            self._num_done = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
        verified = VerifiedTokens.empty(num_sampled, drawn.width, logits.device)
        keys = torch.empty((num_positions, num_blocks), dtype=torch.int64, device=logits.device)
        _launch_verify_most_likely(
            (num_sampled, drawn.width, num_blocks),
            verified.packed, drawn.width, logits, logits.stride(0), vocab_size, keys, self._num_done,
            drawn.positions, drawn.starts, drawn.rows, drawn.draws, known.token_ids, known.token_ids.stride(0),
            known.num_known, known.num_computed, known.drafts, known.drafts.stride(0),
            BLOCK=BLOCK, NUM_BLOCKS=triton.next_power_of_2(num_blocks), WIDTH=_padded_width(known), num_warps=8,
        )  # fmt: skip
        return verified


def _padded_width(known: KnownTokens) -> int:
    """Of any step, so that none compiles anew."""
    width: int = triton.next_power_of_2(1 + known.drafts.shape[1])
    return width


@triton.jit(do_not_specialize=["width"])
def _verify_drafts_kernel(
    verified, width, token_ids, positions, starts, rows, draws,
    known_ids, known_stride, num_known, num_computed, drafts, drafts_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence)."""
    sequence = tl.program_id(0)
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    index = tl.minimum(first + tl.arange(0, WIDTH), end - 1)
    _verify(
        tl.load(token_ids + index).to(tl.int32), end - first, tl.load(positions + first), sequence, verified, width,
        rows, draws, known_ids, known_stride, num_known, num_computed, drafts, drafts_stride, WIDTH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def _verify_most_likely_kernel(
    verified, width, logits, row_stride, vocab_size, keys, num_done, positions, starts, rows, draws,
    known_ids, known_stride, num_known, num_computed, drafts, drafts_stride,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence, one of its positions, block of columns). The last that is done with a sequence verifies it."""
    sequence, column, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_blocks = tl.num_programs(2)
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if column < end - first:
        place = (first + column).to(tl.int64)
        tl.store(keys + place * num_blocks + block, block_key(logits + place * row_stride, block, vocab_size, BLOCK))
        tl.debug_barrier()  # the key is stored by whichever thread before another counts it
        if tl.atomic_add(num_done + sequence, 1) == (end - first) * num_blocks - 1:
            tl.store(num_done + sequence, 0)
            index = tl.minimum(first + tl.arange(0, WIDTH), end - 1).to(tl.int64)
            blocks = tl.arange(0, NUM_BLOCKS)
            key = tl.load(
                keys + index[:, None] * num_blocks + blocks[None, :],
                mask=blocks[None, :] < num_blocks, other=-0x8000000000000000, cache_modifier=".cg",
            )  # fmt: skip
            _verify(
                column_of_key(tl.max(key, 1)).to(tl.int32), end - first, tl.load(positions + first), sequence,
                verified, width, rows, draws, known_ids, known_stride, num_known, num_computed, drafts, drafts_stride,
                WIDTH,
            )  # fmt: skip


@triton.jit
def _verify(
    tokens, count, position, sequence, verified, width, rows, draws,
    known_ids, known_stride, num_known, num_computed, drafts, drafts_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """A sequence's `count` drawn tokens [WIDTH], the first drawn after `position`; the last one is repeated."""
    column = tl.arange(0, WIDTH)
    row = tl.load(rows + sequence).to(tl.int64)
    draft = tl.load(drafts + row * drafts_stride + column, mask=column < count - 1, other=-1)
    num_drafts = tl.min(tl.where(draft >= 0, WIDTH, column), 0)
    num_holding = tl.min(tl.where(draft == tokens, WIDTH, column), 0)  # -1 is no token
    num_accepted = tl.where(tl.load(draws + sequence), 1 + num_holding, 0)

    base = position.to(tl.int32)
    tl.store(known_ids + row * known_stride + base + 1 + column, tokens, mask=column < count)
    tl.store(num_known + row, base + num_accepted + 1)
    tl.store(num_computed + row, base + tl.maximum(num_accepted, 1))
    num_sampled = tl.num_programs(0)
    tl.store(verified + sequence * width + column, tokens, mask=column < width)
    tl.store(verified + num_sampled * width + sequence, num_accepted)
    tl.store(verified + num_sampled * (width + 1) + sequence, num_drafts)


_launch_verify_drafts = Launcher(_verify_drafts_kernel)
_launch_verify_most_likely = Launcher(_verify_most_likely_kernel)
