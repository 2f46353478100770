"""Log-probabilities as clients ask for them: the chosen token, the most likely ones, and the rank of the chosen.

They are computed on the device, and become entries once they have been downloaded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.requests.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    token_ids: Tensor  # int64 [n, 1 + most], the chosen one first, then the most likely in falling order
    logprobs: Tensor  # float32 [n, 1 + most]
    ranks: Tensor  # int64 [n], of the chosen one, from 1

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> LogprobTensors:
    """Of raw logits [n, vocab_size] and the chosen `token_ids` int64 [n], with the `most` most likely."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    likely = logprobs.topk(min(most, logprobs.shape[1]), dim=1)
    return LogprobTensors(
        token_ids=torch.cat((token_ids.unsqueeze(1), likely.indices), dim=1),
        logprobs=torch.cat((chosen, likely.values), dim=1),
        ranks=(logprobs > chosen).sum(dim=1) + 1,
    )


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )


def entries(
    token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any], numbers: list[int]
) -> list[TokenLogprobs]:
    """One entry a line of the downloaded tensors, with so many alternatives each."""
    return [
        TokenLogprobs(ids[: 1 + number], values[: 1 + number], rank)
        for ids, values, rank, number in zip(
            token_ids.tolist(), logprobs.tolist(), ranks.tolist(), numbers, strict=True
        )
    ]
