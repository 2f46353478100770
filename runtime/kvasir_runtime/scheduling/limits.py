"""What bounds a step, and who decides how deep speculation goes."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.step_budget import StepBudget

Rows = NDArray[np.int64]
"""Row numbers, or one number for each of some rows."""
Counts = NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    """Sequences in one step."""
    max_num_batched_tokens: int
    """Token budget of one step."""
    max_model_len: int
    """Tokens of prompt and output."""
    num_stages: int = 1
    """Pipeline stages: so many steps may be under way, and with more than one no sequence decodes in two of them."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be spread over steps."""
    step_budget: StepBudget | None = None
    """Of tokens of prompts, by time; None: as many as max_num_batched_tokens leaves."""


class DraftDepth(Protocol):
    """How many drafts are worth verifying (speculative/depth.py)."""

    @property
    def max_depth(self) -> int:
        """The most that it ever says."""

    def depths(self, rows: Counts) -> Counts:
        """For each row, were they a batch. Asked once or twice a step."""

    def observe(self, rows: Counts, num_asked: Counts, num_accepted: Counts) -> None:
        """How many drafts a step was planned to verify for each row, and how many of them held. Not called for a step
        without any."""

    def forget(self, row: int) -> None:
        """The row has another occupant."""
