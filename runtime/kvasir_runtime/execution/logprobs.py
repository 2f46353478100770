"""Log-probabilities of raw logits, as clients ask for them: the chosen token, the most likely ones, and the rank."""

import torch
from torch import Tensor

from kvasir_runtime.engine.messages import TokenLogprobs


def token_logprobs(logprobs: Tensor, token_ids: Tensor, num_alternatives: list[int]) -> list[TokenLogprobs]:
    """One entry a row of `logprobs` [num_rows, vocab_size], for the chosen `token_ids` int64 [num_rows]."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    most = logprobs.topk(max(num_alternatives), dim=1)
    ids = torch.cat((token_ids.unsqueeze(1), most.indices), dim=1).tolist()
    values = torch.cat((chosen, most.values), dim=1).tolist()
    return [
        TokenLogprobs(row_ids[: 1 + number], row_values[: 1 + number], rank)
        for row_ids, row_values, number, rank in zip(ids, values, num_alternatives, ranks.tolist(), strict=True)
    ]
