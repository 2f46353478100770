"""Computes the steps of encoders: whole texts, of which a vector each is all that is left.

The scheduler plans them as prompts that are not cut, not cached and not continued, so a step is nothing but its new
sequences.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.encoders.attention import Texts
from kvasir_runtime.execution.kv_memory import KvMemory
from kvasir_runtime.execution.step_features import PendingResult, TensorColumns
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.sample import VerifiedTokens
from kvasir_runtime.pooling.description import PoolingDescription
from kvasir_runtime.pooling.head import Head
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.scheduling.step import POOLED, StepPlan, StepTimes

ComputeTexts = Callable[[Texts], Tensor]
"""Hidden states [num_tokens, hidden_size] of all tokens, after the last norm."""


class EncoderRunner:
    """Of the one rank that an encoder has."""

    def __init__(self, compute: ComputeTexts, pooling: PoolingDescription, head: Head, transfers: Transfers) -> None:
        self._compute = compute
        self._pooling = pooling
        self._head = head
        self._transfers = transfers
        self._made: TensorColumns | None = None
        """By the step between `forward` and `sample`."""
        self._seconds = 0.0

    @property
    def kv_buffer(self) -> Tensor:
        """Nothing is kept."""
        return torch.empty((0, 0), dtype=torch.uint8, device=self._transfers.device)

    @property
    def kv_memory(self) -> KvMemory:
        return KvMemory(self.kv_buffer)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        start = time.thread_time()
        self._made = None
        by_row = {new.row: new.spec for new in plan.added}
        specs = [by_row[row] for row in plan.rows.tolist()]
        assert [len(spec.prompt_token_ids) for spec in specs] == plan.num_new_tokens.tolist(), "texts come whole"
        hidden = self._compute(self._texts(specs))
        self._made = {"rows": plan.rows, "vectors": self._head(torch.stack(self._pooled(hidden, specs)))}
        self._seconds = time.thread_time() - start

    def sample(self) -> PendingResult:
        assert self._made is not None, "sample() follows a forward() that ended well"
        nothing = VerifiedTokens.empty(0, 1, self._transfers.device)
        times = StepTimes(self._seconds if self._transfers.is_host else None)
        return PendingResult(nothing, {POOLED: self._made}, times, self._transfers)

    def use_idle_time(self) -> bool:
        return False

    def _texts(self, specs: list[RequestSpec]) -> Texts:
        lengths = [spec.num_prompt_tokens for spec in specs]
        token_ids, positions, types = self._transfers.upload(
            np.concatenate([np.array(spec.prompt_token_ids, dtype=np.int64) for spec in specs]),
            np.concatenate([np.arange(length) for length in lengths]),
            np.concatenate([_types(spec) for spec in specs]),
        )
        return Texts(token_ids, positions, types, lengths)

    def _pooled(self, hidden: Tensor, specs: list[RequestSpec]) -> list[Tensor]:
        """The mean of each text's states that are pooled, float32 [hidden_size]."""
        of_texts = torch.split_with_sizes(hidden, [spec.num_prompt_tokens for spec in specs])
        ranges = [self._pooling.positions(spec.num_prompt_tokens) for spec in specs]
        return [
            states[places.start : places.stop].double().mean(dim=0).float()
            for states, places in zip(of_texts, ranges, strict=True)
        ]


def _types(spec: RequestSpec) -> NDArray[np.int64]:
    start = None if spec.pooling is None else spec.pooling.second_text_start
    types = np.zeros(spec.num_prompt_tokens, dtype=np.int64)
    if start is not None:
        types[start:] = 1
    return types
