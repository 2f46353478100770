"""Penalties for tokens that a sequence holds, in two Triton launches over its tokens; the twin is in
`execution/logit_adjustments.py`.

The first counts each token, and the second changes its logit, once: whoever takes its count does it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.launches import Launcher
from kvasir_runtime.kernels.sample import PositionTensors, SamplingTensors

_BLOCK = 1024
_IN_PROMPT = tl.constexpr(2**30)
"""A bit of a count, of which the lower ones are a token's occurrences in the output."""
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def triton_penalize(logits: Tensor, positions: PositionTensors, tensors: SamplingTensors, max_seq_len: int) -> None:
    """As `Penalize`."""
    num_positions, vocab_size = logits.shape
    counts = torch.zeros((num_positions, vocab_size), dtype=torch.int32, device=logits.device)
    grid = (num_positions, triton.cdiv(max_seq_len, _BLOCK))
    known = (
        counts, vocab_size, positions.rows, positions.after, positions.num_earlier, tensors.num_prompt_tokens,
        tensors.token_ids, tensors.token_ids.stride(0), tensors.drafts, tensors.drafts.stride(0),
    )  # fmt: skip
    _launch_count(grid, *known, BLOCK=_BLOCK)
    _launch_penalize(
        grid, *known, logits, logits.stride(0), tensors.presence_penalty, tensors.frequency_penalty,
        tensors.repetition_penalty, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _count_kernel(
    counts, vocab_size, rows, after, num_earlier, num_prompt_tokens, token_ids, tokens_stride, drafts, drafts_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (position, block of its tokens)."""
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + position)
    token, index = _tokens(
        vocab_size, position, row, after, num_earlier, token_ids, tokens_stride, drafts, drafts_stride, BLOCK
    )
    place = counts + position * vocab_size + token
    is_output = index >= tl.load(num_prompt_tokens + row)
    tl.atomic_add(place, 1, (token >= 0) & is_output, "relaxed")
    tl.atomic_or(place, _IN_PROMPT, (token >= 0) & (is_output == 0), "relaxed")


@triton.jit
def _penalize_kernel(
    counts, vocab_size, rows, after, num_earlier, num_prompt_tokens, token_ids, tokens_stride, drafts, drafts_stride,
    logits, row_stride, presence_penalty, frequency_penalty, repetition_penalty, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (position, block of its tokens). Rounds every step, as torch does."""
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + position)
    token, _ = _tokens(
        vocab_size, position, row, after, num_earlier, token_ids, tokens_stride, drafts, drafts_stride, BLOCK
    )
    found = tl.atomic_xchg(counts + position * vocab_size + token, 0, token >= 0, "relaxed")
    is_first = (token >= 0) & (found != 0)
    count = found & (_IN_PROMPT - 1)
    place = logits + position * row_stride + token
    logit, repetition = tl.load(place, is_first, 0.0), tl.load(repetition_penalty + row)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(count > 0, logit - tl.load(presence_penalty + row), logit)
    logit -= count.to(tl.float32) * tl.load(frequency_penalty + row)
    tl.store(place, tl.minimum(logit, _LARGEST), is_first)


@triton.jit
def _tokens(
    vocab_size, position, row, after, num_earlier, token_ids, tokens_stride, drafts, drafts_stride, BLOCK: tl.constexpr
):
    """A block of the tokens before a position, known ones and then drafts, and their places; -1 where there is none."""
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    earlier = tl.load(num_earlier + position)
    num_known = tl.load(after + position) + 1 - earlier
    is_known, is_draft = index < num_known, (index >= num_known) & (index < num_known + earlier)
    known = tl.load(token_ids + row * tokens_stride + index, is_known, -1)
    draft = tl.load(drafts + row * drafts_stride + index - num_known, is_draft, -1)
    token = tl.where(is_known, known, draft)
    return tl.where(token < vocab_size, token, -1), index


_launch_count, _launch_penalize = Launcher(_count_kernel), Launcher(_penalize_kernel)
