"""Draws tokens on a CPU, from adjusting the logits to the draw, in one kernel that looks at most logits once.

The twin, with the rules, is `execution/sampler.py` over plain torch.
"""

import ctypes
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvasir_runtime.kernels.native import DTYPE_CODES


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


Sample = Callable[[Tensor, PositionTensors, SamplingTensors], Tensor]
"""(logits [num_positions, vocab_size], which are left as they are; ...) -> token ids int64 [num_positions]."""

_WIDTHS = ("stop_ids", "bias_ids", "token_ids", "drafts")


class _Sampling(ctypes.Structure):
    """As SamplingTensors in sample.cpp."""

    _fields_ = [(of.name, ctypes.c_void_p) for of in fields(SamplingTensors)] + [
        (f"max_{name}", ctypes.c_int64) for name in _WIDTHS
    ]


class _Positions(ctypes.Structure):
    """As Positions in sample.cpp."""

    _fields_ = [(of.name, ctypes.c_void_p) for of in fields(PositionTensors)] + [("mask_stride", ctypes.c_int64)]


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
