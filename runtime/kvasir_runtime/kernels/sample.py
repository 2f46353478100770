"""Tokens after a step: drawn from the logits, and kept as far as the drafts hold.

Greedy sampling takes the largest number of a row, the first of equals. All else a CPU draws in one kernel, from
adjusting the logits to the draw, that looks at most logits once, and CUDA in two or three launches
(`sample_triton.py`); the twin, with the rules, is `execution/sampler.py` over plain torch.

A draft holds if it is the token that was drawn there. Every position draws with its own number of (seed, position),
exactly as without drafts, so tokens do not depend on them: Daliri, Musco, Suresh 2024, "Coupling without communication
and drafter-invariant speculative decoding".
"""

import ctypes
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [T] for logits [T, V]; NaN counts as -inf, and where all are, 0 is returned."""
    return logits.masked_fill(logits.isnan(), float("-inf")).argmax(dim=-1)


def cpu_argmax(library: CDLL) -> Callable[[torch.Tensor], torch.Tensor]:
    """The compiled argmax."""
    native = library.kvasir_argmax

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype not in DTYPE_CODES or logits.stride(1) != 1:
            warn_of_twin("argmax", f"the logits are {logits.dtype} with strides {logits.stride()}")
            return argmax_reference(logits)
        rows, width = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        native(DTYPE_CODES[logits.dtype], logits.data_ptr(), logits.stride(0), out.data_ptr(), rows, width)
        return out

    return argmax


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """What sequences are sampled by; the first axis is the row."""

    inverse_temperature: Tensor  # float32, 0 of a greedy row
    top_p: Tensor  # float32
    log_min_p: Tensor  # float32
    presence_penalty: Tensor  # float32
    frequency_penalty: Tensor  # float32
    repetition_penalty: Tensor  # float32
    top_k: Tensor  # int32, vocab_size keeps all
    min_tokens: Tensor  # int32
    seeds: Tensor  # int64, the bits of unsigned ones
    num_stop_ids: Tensor  # int64
    stop_ids: Tensor  # int64 [num_rows, most]
    num_biases: Tensor  # int64
    bias_ids: Tensor  # int64 [num_rows, most]
    biases: Tensor  # float32 [num_rows, most]
    token_ids: Tensor  # int32 [num_rows, most], of prompt and output
    num_prompt_tokens: Tensor  # int32
    drafts: Tensor  # int32 [num_rows, most]


@dataclass(frozen=True, slots=True)
class PositionTensors:
    """The positions of a step that tokens are drawn after."""

    rows: Tensor  # int64 [num_positions]
    after: Tensor  # int64 [num_positions], within the sequence
    num_earlier: Tensor  # int64 [num_positions], drafts that count as drawn already
    mask: Tensor | None
    """int32 [num_positions, vocab_size / 32, rounded up]: bit t % 32 of number t / 32 allows token t."""
    is_random: bool
    """Whether any row is; the host knows."""
    has_nucleus: bool
    """Whether any random row has top_p and no top_k."""


Argmax = Callable[[Tensor], Tensor]
"""Logits [num_positions, vocab_size] -> token ids int64 [num_positions]."""
Sample = Callable[[Tensor, PositionTensors, SamplingTensors], Tensor]
"""(logits [num_positions, vocab_size], which are left as they are; ...) -> token ids int64 [num_positions]."""
Penalize = Callable[[Tensor, PositionTensors, SamplingTensors, int], None]
"""Changes float32 logits [num_positions, vocab_size] by penalties; no sequence is longer than the last argument."""

_WIDTHS = ("stop_ids", "bias_ids", "token_ids", "drafts")


class _Sampling(ctypes.Structure):
    """As SamplingTensors in sample.cpp."""

    _fields_ = [(of.name, ctypes.c_void_p) for of in fields(SamplingTensors)] + [
        (f"max_{name}", ctypes.c_int64) for name in _WIDTHS
    ]


class _Positions(ctypes.Structure):
    """As Positions in sample.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("rows", "after", "num_earlier", "mask")] + [
        ("mask_stride", ctypes.c_int64)
    ]


def cpu_sample(library: CDLL) -> Sample:
    """The compiled kernel, for all types of logits that are compiled."""
    native = library.kvasir_sample

    def sample(logits: Tensor, positions: PositionTensors, tensors: SamplingTensors) -> Tensor:
        logits, (count, vocab_size) = logits.contiguous(), logits.shape
        of_rows = _Sampling(
            *(getattr(tensors, of.name).data_ptr() for of in fields(SamplingTensors)),
            *(getattr(tensors, name).shape[1] for name in _WIDTHS),
        )
        mask = None if positions.mask is None else positions.mask.contiguous()
        of_positions = _Positions(
            *(tensor.data_ptr() for tensor in (positions.rows, positions.after, positions.num_earlier)),
            *((None, 0) if mask is None else (mask.data_ptr(), mask.shape[1])),
        )
        out = torch.empty(count, dtype=torch.int64)
        native(
            DTYPE_CODES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            count,
            vocab_size,
            ctypes.addressof(of_positions),
            ctypes.addressof(of_rows),
            out.data_ptr(),
        )
        return out

    return sample


@dataclass(frozen=True, slots=True)
class DrawnPositions:
    """The positions of a step that tokens are drawn after, sequence after sequence, and where the tokens belong."""

    positions: Tensor  # int64 [num_positions], those drawn after
    starts: Tensor  # int32 [num_sampled + 1], first position of each sequence, then their number
    rows: Tensor  # int32 [num_sampled]
    draws: Tensor  # bool [num_sampled]; where the core chooses nothing is drawn
    width: int
    """Most positions of a sequence: its drafts and one."""


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """Parts of one tensor, so that one copy brings them to the host."""

    packed: Tensor  # int32 [num_sampled * (width + 2)]: the three below, one behind the other
    width: int
    token_ids: Tensor  # int32 [num_sampled, width], as drawn; only the first `num_accepted` hold
    num_accepted: Tensor  # int32 [num_sampled], the drafts that hold and one more; 0 where nothing is drawn
    num_drafts: Tensor  # int32 [num_sampled], drafts that were there to verify

    @classmethod
    def of(cls, packed: Tensor, width: int) -> "VerifiedTokens":
        num_sampled = packed.shape[0] // (width + 2)
        token_ids, num_accepted, num_drafts = packed.split_with_sizes((num_sampled * width, num_sampled, num_sampled))
        return cls(packed, width, token_ids.view(-1, width), num_accepted, num_drafts)

    @classmethod
    def empty(cls, num_sampled: int, width: int, device: torch.device) -> "VerifiedTokens":
        return cls.of(torch.empty(num_sampled * (width + 2), dtype=torch.int32, device=device), width)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What verifying changes of the rows; all contiguous."""

    token_ids: Tensor  # int32 [num_rows, max_model_len + 1]
    num_known: Tensor  # int32 [num_rows]
    num_computed: Tensor  # int32 [num_rows]
    drafts: Tensor  # int32 [num_rows, max_drafts]


VerifyDrafts = Callable[[Tensor, DrawnPositions, KnownTokens], VerifiedTokens]
VerifyMostLikely = Callable[[Tensor, DrawnPositions, KnownTokens], VerifiedTokens]


def verify_drafts_reference(token_ids: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
    """Accept the longest run of drafts that hold and the token drawn after it; the rows know them from now on.

    `token_ids` int64 [num_positions] were drawn. A row that draws nothing knows no more than before, but its
    last known token is computed. Tokens that do not hold are stored behind those that are known, where nobody reads
    them.
    """
    rows = drawn.rows.long()
    first, counts = drawn.starts[:-1].long(), drawn.starts.diff()
    column = torch.arange(drawn.width, device=rows.device)
    index = first.unsqueeze(1) + torch.minimum(column, counts.unsqueeze(1) - 1)
    own = token_ids[index].int()
    drafts = known.drafts[rows, : drawn.width - 1]
    is_there = (column[1:] < counts.unsqueeze(1)) & (drafts >= 0)
    is_there = is_there.cumprod(dim=1).bool()
    holds = is_there & (drafts == own[:, :-1])
    num_accepted = torch.where(drawn.draws, 1 + holds.cumprod(dim=1).sum(dim=1), 0).int()
    base = drawn.positions[first].int()
    known.token_ids[rows.unsqueeze(1), drawn.positions[index] + 1] = own
    known.num_known[rows] = base + num_accepted + 1
    known.num_computed[rows] = base + num_accepted.clamp(min=1)
    return VerifiedTokens.of(torch.cat((own.flatten(), num_accepted, is_there.sum(dim=1).int())), drawn.width)


def verify_most_likely(argmax: Callable[[Tensor], Tensor], verify_drafts: VerifyDrafts) -> VerifyMostLikely:
    """One after the other: draw the most likely tokens of logits [num_positions, vocab_size], and verify the drafts."""
    return lambda logits, drawn, known: verify_drafts(argmax(logits), drawn, known)


def cpu_verify_drafts(library: CDLL) -> VerifyDrafts:
    """The compiled form."""
    native = library.kvasir_verify_drafts

    def verify_drafts(token_ids: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
        num_sampled = drawn.rows.shape[0]
        verified = VerifiedTokens.empty(num_sampled, drawn.width, drawn.rows.device)
        native(
            token_ids.data_ptr(),
            drawn.positions.data_ptr(),
            drawn.starts.data_ptr(),
            drawn.rows.data_ptr(),
            drawn.draws.data_ptr(),
            num_sampled,
            drawn.width,
            known.token_ids.data_ptr(),
            known.token_ids.shape[1],
            known.num_known.data_ptr(),
            known.num_computed.data_ptr(),
            known.drafts.data_ptr(),
            known.drafts.shape[1],
            verified.token_ids.data_ptr(),
            verified.num_accepted.data_ptr(),
            verified.num_drafts.data_ptr(),
        )
        return verified

    return verify_drafts
