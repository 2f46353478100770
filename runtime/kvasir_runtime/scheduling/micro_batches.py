"""What pipeline stages ask of planning: as many micro-batches as stages, and word of the tokens that the last one drew.

A sequence decodes in one step under way at most, so decodes are dealt out evenly over the steps that are.
"""

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.scheduling.limits import Rows
from kvasir_runtime.scheduling.running_rows import RunningRows
from kvasir_runtime.scheduling.step import ReturnedTokens, StepResult


def micro_batch(rows: Rows, is_awaited: NDArray[np.bool_], num_stages: int) -> Rows:
    """Of all rows that decode, by rank, those of the next step: an even part, none of which a step under way holds.

    No row is passed over for long: a step that leaves some out follows steps that held less than their part.
    """
    part = -(-len(rows) // num_stages)
    ready: Rows = rows[~is_awaited]
    return ready[:part]


def take_returned(state: RunningRows, rows: Rows, lengths: Rows) -> ReturnedTokens:
    """What the stages before the last do not know of these decodes, of so many tokens each; from now on they do."""
    first, last = state.num_returned[rows], state.num_known[rows]
    counts = last - first
    own = np.repeat(rows, counts)
    ends = np.cumsum(counts)
    positions = np.repeat(last - ends, counts) + np.arange(len(own))
    state.num_returned[rows] = last
    writes = np.stack((own, positions, state.token_ids[own, positions]), axis=1).astype(np.int32)
    return ReturnedTokens(writes, state.drafts[rows, : int(lengths.max(initial=1)) - 1])


def keep_drafts(state: RunningRows, rows: Rows, result: StepResult, lines: NDArray[np.intp]) -> None:
    """Drafts of the result's `lines`, for when their `rows` decode next."""
    if result.drafts is not None:
        num_proposals = result.drafts.shape[1]
        state.drafts[rows, :num_proposals] = result.drafts[lines]
        state.drafts[rows, num_proposals:] = -1
