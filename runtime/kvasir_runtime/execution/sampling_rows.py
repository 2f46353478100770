"""Sampling parameters of the requests in flight as arrays, one row a request, so that a step reads them without a loop.

`traits` says in one byte what a row needs beyond the most likely token; a step without traits is one argmax.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.engine.messages import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: dividing by less leaves the range of float32."""


class Trait:
    """Bits; plain numbers, since an enum's cost numpy ten times as long."""

    RANDOM = 1
    PENALTIES = 2
    LOGIT_BIAS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32


class SamplingRows:
    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.traits = np.zeros(max_num_seqs, dtype=np.uint8)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.stop_token_ids: dict[int, NDArray[np.int64]] = {}
        """Row -> ids kept from being sampled before min_tokens."""
        self.logit_bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def traits_of(self, rows: NDArray[np.int64]) -> int:
        """All that some of these rows need."""
        return int(np.bitwise_or.reduce(self.traits[rows]))

    def having(self, trait: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into `rows` of those that need `trait`."""
        return np.flatnonzero(self.traits[rows] & trait)

    def add(self, row: int, sampling: SamplingParams) -> None:
        self.temperature[row] = max(sampling.temperature, MIN_TEMPERATURE)
        self.top_p[row] = sampling.top_p
        self.top_k[row] = min(sampling.top_k or self.vocab_size, self.vocab_size)
        self.min_p[row] = sampling.min_p
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.seed[row] = sampling.seed % 2**64
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = sampling.logprobs or 0
        self.num_prompt_logprobs[row] = sampling.prompt_logprobs or 0
        self.stop_token_ids[row] = self._known(sampling.stop_token_ids)
        if sampling.logit_bias:
            bias = {token: value for token, value in sampling.logit_bias.items() if token < self.vocab_size}
            self.logit_bias[row] = (self._known(bias), np.fromiter(bias.values(), np.float32, len(bias)))
        self.traits[row] = _traits(sampling)

    def forget(self, row: int) -> None:
        self.traits[row] = 0
        self.stop_token_ids.pop(row, None)
        self.logit_bias.pop(row, None)

    def _known(self, token_ids: Iterable[int]) -> NDArray[np.int64]:
        """Ids outside the vocabulary can never be sampled, and must not be looked up."""
        return np.array([token for token in token_ids if token < self.vocab_size], dtype=np.int64)


def _traits(sampling: SamplingParams) -> int:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    needed = {
        Trait.RANDOM: sampling.temperature >= MIN_TEMPERATURE,
        Trait.PENALTIES: any(penalties),
        Trait.LOGIT_BIAS: bool(sampling.logit_bias),
        Trait.MIN_TOKENS: sampling.min_tokens > 0 and bool(sampling.stop_token_ids),
        Trait.LOGPROBS: sampling.logprobs is not None,
        Trait.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None,
    }
    return sum(trait for trait, is_needed in needed.items() if is_needed)
