"""Sampling parameters of the sequences in flight: tensors on the device, one entry a row, written when a row is taken.

The host keeps a row's traits in one number: what a step needs is known without asking the device, and a step whose rows
have no trait is one argmax.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.requests.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: dividing by less leaves the range of float32."""

Int32Array = NDArray[np.int32]


class Trait:
    """Bits; plain numbers, since an enum's cost numpy ten times as long."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 256
    PENALTIES = 8
    LOGIT_BIAS = 16
    MIN_TOKENS = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128

    ADJUSTMENTS = PENALTIES | LOGIT_BIAS | MIN_TOKENS


class SamplingRows:
    """`num_rows` rows; the tensors' first axis is the row."""

    def __init__(self, num_rows: int, vocab_size: int, transfers: Transfers) -> None:
        device = transfers.device
        self.vocab_size = vocab_size
        self._transfers = transfers
        self._floats = torch.ones((6, num_rows), device=device)
        self.inverse_temperature, self.top_p, self.log_min_p = self._floats[:3]
        """`inverse_temperature` is 0 of a greedy row."""
        self.presence_penalty, self.frequency_penalty, self.repetition_penalty = self._floats[3:]
        self._integers = torch.ones((2, num_rows), dtype=torch.int32, device=device)
        self.top_k, self.min_tokens = self._integers
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The bits of unsigned seeds."""
        self.stop_token_ids = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        """Kept from being sampled before min_tokens; a row's last is repeated to the width of the longest."""
        self.num_stop_ids = np.zeros(num_rows, dtype=np.int64)
        self.bias_token_ids = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        self.bias_values = torch.zeros((num_rows, 0), device=device)
        self.num_biases = np.zeros(num_rows, dtype=np.int64)
        self.traits = np.zeros(num_rows, dtype=np.uint16)
        self.num_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_logprobs = np.zeros(num_rows, dtype=np.int64)

    def traits_of(self, rows: Int32Array) -> int:
        """All that some of these rows need."""
        return int(np.bitwise_or.reduce(self.traits[rows]))

    def having(self, trait: int, rows: Int32Array) -> NDArray[np.bool_]:
        """Which of these rows have it."""
        return (self.traits[rows] & trait) > 0

    def write(self, rows: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
        """Take over the parameters of new sequences and forks."""
        for row, sampling in zip(rows, samplings, strict=True):
            self.traits[row] = _traits(sampling, self.vocab_size)
            self.num_logprobs[row] = sampling.logprobs or 0
            self.num_prompt_logprobs[row] = sampling.prompt_logprobs or 0
        index, floats, integers, seeds = self._transfers.upload(
            np.array(rows, dtype=np.int64),
            np.array([_floats(sampling) for sampling in samplings], dtype=np.float32).T,
            np.array([self._integers_of(sampling) for sampling in samplings], dtype=np.int32).T,
            np.array([sampling.seed % 2**64 for sampling in samplings], dtype=np.uint64).view(np.int64),
        )
        self._floats[:, index] = floats
        self._integers[:, index] = integers
        self.seeds[index] = seeds
        self._fit_widths(rows, samplings)
        for row, sampling in zip(rows, samplings, strict=True):
            if self.traits[row] & Trait.MIN_TOKENS:
                self._write_stop_tokens(row, self._known(sampling.stop_token_ids))
            if self.traits[row] & Trait.LOGIT_BIAS:
                self._write_bias(row, sampling.logit_bias)

    def _fit_widths(self, rows: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
        """To the longest lists that there are now: those that the rows held before are forgotten."""
        for row, sampling in zip(rows, samplings, strict=True):
            is_limited = self.traits[row] & Trait.MIN_TOKENS
            self.num_stop_ids[row] = len(self._known(sampling.stop_token_ids)) if is_limited else 0
            self.num_biases[row] = len(self._known(sampling.logit_bias))
        self.stop_token_ids = _resized(self.stop_token_ids, int(self.num_stop_ids.max()))
        self.bias_token_ids = _resized(self.bias_token_ids, int(self.num_biases.max()))
        self.bias_values = _resized(self.bias_values, int(self.num_biases.max()))

    def _integers_of(self, sampling: SamplingParams) -> tuple[int, int]:
        return min(sampling.top_k or self.vocab_size, self.vocab_size), sampling.min_tokens

    def _write_stop_tokens(self, row: int, token_ids: list[int]) -> None:
        padded = _padded(token_ids, self.stop_token_ids.shape[1])
        (self.stop_token_ids[row],) = self._transfers.upload(np.array(padded, dtype=np.int64))

    def _write_bias(self, row: int, logit_bias: dict[int, float]) -> None:
        token_ids = self._known(logit_bias)
        padded = _padded(token_ids, self.bias_token_ids.shape[1])
        self.bias_token_ids[row], self.bias_values[row] = self._transfers.upload(
            np.array(padded, dtype=np.int64), np.array([logit_bias[token] for token in padded], dtype=np.float32)
        )

    def _known(self, token_ids: Sequence[int] | dict[int, float]) -> list[int]:
        """Ids outside the vocabulary can never be sampled, and must not be looked up."""
        return [token for token in token_ids if 0 <= token < self.vocab_size]


def _floats(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        1.0 / sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )


def _traits(sampling: SamplingParams, vocab_size: int) -> int:
    """Parameters of a greedy row that only shape a draw are no traits of it."""
    is_random = sampling.temperature >= MIN_TEMPERATURE
    has_top_k = sampling.top_k is not None and 0 < sampling.top_k < vocab_size
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    needed = {
        Trait.RANDOM: is_random,
        Trait.TOP_K: is_random and has_top_k,
        Trait.TOP_P: is_random and sampling.top_p < 1.0,
        Trait.PENALTIES: any(penalties),
        Trait.LOGIT_BIAS: any(0 <= token < vocab_size for token in sampling.logit_bias),
        Trait.MIN_TOKENS: sampling.min_tokens > 0 and any(0 <= token < vocab_size for token in sampling.stop_token_ids),
        Trait.LOGPROBS: sampling.logprobs is not None,
        Trait.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None,
    }
    return sum(trait for trait, is_needed in needed.items() if is_needed)


def _padded(token_ids: list[int], width: int) -> list[int]:
    """The last repeated: setting a logit twice to the same number changes nothing."""
    return token_ids + token_ids[-1:] * (width - len(token_ids))


def _resized(tensor: Tensor, width: int) -> Tensor:
    """The tensor with so many columns, new ones padded as rows are."""
    missing = width - tensor.shape[1]
    if missing <= 0:
        return tensor if missing == 0 else tensor[:, :width].clone()
    last = tensor[:, -1:] if tensor.shape[1] else tensor.new_zeros((tensor.shape[0], 1))
    return torch.cat((tensor, last.expand(-1, missing)), dim=1)
