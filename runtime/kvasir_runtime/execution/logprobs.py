"""Log-probabilities as clients ask for them: the chosen token, the most likely ones, and the rank of the chosen."""

import torch
from torch import Tensor

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions
from kvasir_runtime.execution.sampling_rows import Trait
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, StepFeature, TensorColumns
from kvasir_runtime.scheduling.step import LOGPROBS, BoolArray, Int32Array


class Logprobs(StepFeature):
    """Of drawn tokens, from the raw logits."""

    name = LOGPROBS

    def __init__(self, rows: Rows) -> None:
        self._sampling = rows.sampling
        self._raw: Tensor | None = None

    def wanted_by(self, rows: Int32Array) -> BoolArray:
        return self._sampling.having(Trait.LOGPROBS, rows)

    def adjust(self, logits: Tensor, positions: SampledPositions) -> Tensor:
        own = positions.having(self.name, self.wanted_by)
        self._raw = None if own is None else own.of(logits)
        return logits

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """A line for each position. `lines` and `offsets` say which token of the result it is about."""
        positions = step.positions
        own, raw = positions.having(self.name, self.wanted_by), self._raw
        if drawn is None or own is None or raw is None:
            return None
        self._raw = None
        numbers = self._sampling.num_logprobs[own.host_rows]
        token_ids = drawn.verified.token_ids.flatten()[positions.places].long()
        return {
            "rows": own.host_rows,
            "numbers": numbers,
            "lines": positions.host_sequences[own.host_index],
            "offsets": positions.host_offsets[own.host_index],
            **token_logprobs(raw, own.of(token_ids), int(numbers.max())),
        }


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> dict[str, Tensor]:
    """Of raw logits [n, vocab_size] and the chosen `token_ids` int64 [n]: the chosen first, then the `most` most likely
    in falling order."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    likely = logprobs.topk(min(most, logprobs.shape[1]), dim=1)
    return {
        "token_ids": torch.cat((token_ids.unsqueeze(1), likely.indices), dim=1),  # int64 [n, 1 + most]
        "logprobs": torch.cat((chosen, likely.values), dim=1),  # float32 [n, 1 + most]
        "ranks": (logprobs > chosen).sum(dim=1) + 1,  # int64 [n], of the chosen one, from 1
    }
