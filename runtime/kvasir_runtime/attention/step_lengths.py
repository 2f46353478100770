"""What the host knows of a step's shape: enough to size grids and buffers without asking the device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """`query_lens` are exact; `max_seq_len` is a bound, since a step under way decides how many drafts hold."""

    query_lens: NDArray[np.int32]  # [num_requests], the decodes first
    num_decodes: int
    """Requests with one token and perhaps drafts; the rest are prefill chunks."""
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def max_query_len(self) -> int:
        return int(self.query_lens.max())


@dataclass(frozen=True, slots=True)
class DecodeBounds:
    """The most decodes of any step: they size what a backend keeps, and fix shapes that must not follow the batch."""

    max_num_decodes: int
    max_query_len: int
    """One token and the most drafts."""

    @property
    def max_num_tokens(self) -> int:
        return self.max_num_decodes * self.max_query_len
