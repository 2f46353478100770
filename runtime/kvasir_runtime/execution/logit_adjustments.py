"""Changes to logits before anything is drawn: penalties for repeated tokens, logit_bias, and min_tokens.

Repetition counts prompt and output, presence and frequency only the output, as Hugging Face and OpenAI define them.
Each is applied to the tokens concerned alone, not to the whole vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.execution.device import upload
from kvasir_runtime.execution.input_batch import Int64Array, RequestRows
from kvasir_runtime.execution.sampling_rows import Trait


def adjust_logits(logits: Tensor, requests: RequestRows, rows: Int64Array, positions: Int64Array) -> Tensor:
    """Adjust float32 logits [num_rows, vocab_size] in place; `positions` [num_rows] are those about to be sampled."""
    traits = requests.sampling.traits_of(rows)
    if traits & Trait.PENALTIES:
        _penalize(logits, requests, rows, positions)
    if traits & Trait.LOGIT_BIAS:
        for index in requests.sampling.having(Trait.LOGIT_BIAS, rows):
            token_ids, bias = requests.sampling.logit_bias[rows[index]]
            logits[index, upload(token_ids, logits.device)] += upload(bias, logits.device)
    if traits & Trait.MIN_TOKENS:
        _forbid_stop_tokens(logits, requests, rows, positions)
    return logits


def _penalize(logits: Tensor, requests: RequestRows, rows: Int64Array, positions: Int64Array) -> None:
    sampling = requests.sampling
    index = sampling.having(Trait.PENALTIES, rows)
    rows, positions = rows[index], positions[index]
    seen, token_ids = _tokens_between(requests, rows, np.zeros_like(positions), positions)
    place = _place(logits, index[seen], token_ids)
    penalty = upload(sampling.repetition_penalty[rows][seen], logits.device)
    values = logits[place]
    # A token that occurs twice is read before either write, so it is penalised once.
    logits[place] = torch.where(values > 0, values / penalty, values * penalty)
    seen, token_ids = _tokens_between(requests, rows, requests.num_prompt_tokens[rows], positions)
    place = _place(logits, index[seen], token_ids)
    logits[place] = logits[place] - upload(sampling.presence_penalty[rows][seen], logits.device)
    logits.index_put_(place, -upload(sampling.frequency_penalty[rows][seen], logits.device), accumulate=True)


def _tokens_between(
    requests: RequestRows, rows: Int64Array, first: Int64Array, last: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """All tokens `[first, last)` of the rows laid end to end: (index into rows, token id)."""
    lengths = last - first
    starts = np.cumsum(lengths) - lengths
    index = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(lengths.sum()) + np.repeat(first - starts, lengths)
    return index, requests.token_ids[rows[index], positions].astype(np.int64)


def _place(logits: Tensor, row_index: Int64Array, token_ids: Int64Array) -> tuple[Tensor, Tensor]:
    return upload(row_index, logits.device), upload(token_ids, logits.device)


def _forbid_stop_tokens(logits: Tensor, requests: RequestRows, rows: Int64Array, positions: Int64Array) -> None:
    sampling = requests.sampling
    num_output = positions - requests.num_prompt_tokens[rows]
    for index in sampling.having(Trait.MIN_TOKENS, rows):
        if num_output[index] < sampling.min_tokens[rows[index]]:
            logits[index, upload(sampling.stop_token_ids[rows[index]], logits.device)] = float("-inf")
