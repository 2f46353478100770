"""A step's results on their way from the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvasir_runtime.execution.step_features import TensorColumns
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.verify_drafts import VerifiedTokens
from kvasir_runtime.scheduling.step import StepResult, StepTimes


class PendingResult:
    """`result` waits for the device; steps may be computed in between."""

    def __init__(
        self, verified: VerifiedTokens, columns: Mapping[str, TensorColumns], times: StepTimes, transfers: Transfers
    ) -> None:
        self._width = verified.width
        self._columns = columns
        self._times = times
        of_features = [column for each in columns.values() for column in each.values() if isinstance(column, Tensor)]
        self._download = transfers.download([verified.packed, *of_features])

    def result(self) -> StepResult:
        packed, *of_features = self._download.arrays()
        verified, arrived = VerifiedTokens(torch.from_numpy(packed), self._width), iter(of_features)
        return StepResult(
            token_ids=verified.token_ids.numpy(),
            num_accepted=verified.num_accepted.numpy(),
            num_drafts=verified.num_drafts.numpy(),
            columns={
                feature: {
                    name: next(arrived) if isinstance(column, Tensor) else column for name, column in columns.items()
                }
                for feature, columns in self._columns.items()
            },
            times=self._times,
        )
