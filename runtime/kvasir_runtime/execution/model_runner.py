"""Executes one scheduled step: rows, inputs, decoder, logits of the tokens that matter, sampling, results.

Steps run strictly in order on one thread. Sampled tokens are kept in the rows, so a step may compute a token that the
scheduler has not seen yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionMetadata
from kvasir_runtime.engine.messages import TokenLogprobs
from kvasir_runtime.execution.device import upload
from kvasir_runtime.execution.input_batch import Int64Array, RequestRows, StepInputs
from kvasir_runtime.execution.logprobs import token_logprobs
from kvasir_runtime.execution.sampler import sample
from kvasir_runtime.execution.sampling_rows import Trait
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.models.decoder import Decoder
from kvasir_runtime.models.layers import StepContext
from kvasir_runtime.scheduling.batch import BatchOutput, ScheduledBatch

_NONE: Int64Array = np.empty(0, dtype=np.int64)
_PROMPT_LOGITS_AT_ONCE = 128
"""Prompt positions scored together: a whole prompt's logits over a large vocabulary would take gigabytes."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens of one request to be scored in a step."""

    request_id: str
    row: int
    tokens: Int64Array  # [num_scored], the step's tokens whose logits score
    scored_ids: Int64Array  # [num_scored], the prompt token after each


class ModelRunner:
    """Owns the rows and the KV cache of one rank.

    `kv_cache` is the rank's buffer [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
    """

    def __init__(self, decoder: Decoder, ops: Ops, rows: RequestRows, kv_cache: Tensor) -> None:
        self._decoder = decoder
        self._ops = ops
        self._rows = rows
        self._device = kv_cache.device
        self._layer_caches = [(kv_cache[:, i, 0], kv_cache[:, i, 1]) for i in range(kv_cache.shape[1])]

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> BatchOutput:
        """Compute the step and wait for its tokens."""
        self._rows.apply(batch)
        step = self._rows.step_inputs(batch.requests)
        sampling = np.flatnonzero(step.samples)
        traits = self._rows.sampling.traits_of(step.rows)
        prompts = self._prompt_scores(batch, step) if traits & Trait.PROMPT_LOGPROBS else []
        hidden = self._forward(step, _kept_tokens(step, sampling, prompts))
        token_ids, logprobs = self._sample(hidden[: len(sampling)], step, sampling, traits)
        return BatchOutput(token_ids, logprobs, self._score(hidden[len(sampling) :], prompts))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the rows of requests before a batch would."""
        for request_id in request_ids:
            self._rows.forget(request_id)

    def _forward(self, step: StepInputs, kept_tokens: Int64Array | None) -> Tensor:
        """Hidden states [num_kept, hidden_size] of the kept tokens (None: all)."""
        device = self._device
        metadata = AttentionMetadata(
            query_starts=upload(step.query_starts, device),
            seq_lens=upload(step.seq_lens, device),
            block_table=upload(step.block_table, device),
            slots=upload(step.slots, device),
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
        )
        context = StepContext(upload(step.positions, device), metadata)
        kept = None if kept_tokens is None else upload(kept_tokens, device)
        return self._decoder(upload(step.token_ids, device), context, self._layer_caches, kept)

    def _sample(
        self, hidden: Tensor, step: StepInputs, sampling: Int64Array, traits: int
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens for the requests `sampling` (indices into the step), whose last hidden states are given."""
        if not len(sampling):
            return [], []
        rows, positions = step.rows[sampling], step.seq_lens[sampling].astype(np.int64)
        logits = self._decoder.logits(hidden)
        asked = self._rows.sampling.having(Trait.LOGPROBS, rows) if traits & Trait.LOGPROBS else _NONE
        raw = logits[upload(asked, self._device)].float().log_softmax(dim=-1) if len(asked) else None
        sampled = sample(logits, self._rows, rows, positions, self._ops.argmax)
        token_ids = sampled.cpu().numpy()
        self._rows.store_sampled(rows, positions, token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            numbers = self._rows.sampling.num_logprobs[rows[asked]].tolist()
            entries = token_logprobs(raw, sampled[upload(asked, self._device)], numbers)
            for index, entry in zip(asked.tolist(), entries, strict=True):
                logprobs[index] = entry
        return token_ids.tolist(), logprobs

    def _prompt_scores(self, batch: ScheduledBatch, step: StepInputs) -> list[PromptScores]:
        """Prompt tokens that requests want scored and whose predecessors are computed in this step."""
        wanting = self._rows.sampling.having(Trait.PROMPT_LOGPROBS, step.rows)
        scores = []
        for index in wanting.tolist():
            row, request = int(step.rows[index]), batch.requests[index]
            first = request.num_computed_tokens
            last = min(first + request.num_new_tokens, int(self._rows.num_prompt_tokens[row]) - 1)
            if first < last:
                tokens = np.arange(last - first) + step.query_starts[index]
                scored_ids = self._rows.token_ids[row, first + 1 : last + 1].astype(np.int64)
                scores.append(PromptScores(request.request_id, row, tokens, scored_ids))
        return scores

    def _score(self, hidden: Tensor, prompts: list[PromptScores]) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of the prompts' tokens, from the hidden states that follow the samples'."""
        scores: dict[str, list[TokenLogprobs]] = {}
        for prompt in prompts:
            own, hidden = hidden[: len(prompt.tokens)], hidden[len(prompt.tokens) :]
            number = int(self._rows.sampling.num_prompt_logprobs[prompt.row])
            entries = scores[prompt.request_id] = []
            scored_ids = upload(prompt.scored_ids, self._device)
            for start in range(0, len(own), _PROMPT_LOGITS_AT_ONCE):
                some = slice(start, start + _PROMPT_LOGITS_AT_ONCE)
                logprobs = self._decoder.logits(own[some]).float().log_softmax(dim=-1)
                entries.extend(token_logprobs(logprobs, scored_ids[some], [number] * len(logprobs)))
        return scores


def _kept_tokens(step: StepInputs, sampling: Int64Array, prompts: list[PromptScores]) -> Int64Array | None:
    """Tokens whose logits are wanted: those sampled after, then those that score prompts; None: all, in order.

    A step that wants none still keeps its last token, so that no kernel meets an empty input.
    """
    if not prompts and len(sampling) == len(step.token_ids):
        return None
    last_tokens = step.query_starts[1:][sampling].astype(np.int64) - 1
    kept = np.concatenate([last_tokens, *(prompt.tokens for prompt in prompts)])
    return kept if len(kept) else np.array([len(step.token_ids) - 1])
