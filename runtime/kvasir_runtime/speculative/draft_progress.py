"""How far a draft model has computed each row, kept on the host: rows change hands and fork without its being told."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.speculative.proposer import VerifiedStep


@dataclass(slots=True)
class _RowProgress:
    num_known: int
    """When the row was last seen."""
    num_computed: int
    """Known tokens whose KV the draft has."""
    num_drafts: int
    """Drafts after them that it has computed too, which count as far as they hold."""


class DraftProgress:
    def __init__(self) -> None:
        self._rows: dict[int, _RowProgress] = {}

    def observe(self, step: VerifiedStep) -> NDArray[np.int64]:
        """Take note of a step whose chunks the draft has computed; known tokens int64 [num_sampled] that it has not.

        A row that does not go on from where it was seen holds another sequence. The draft is then supposed to have
        computed what the target had: so it has for a prompt just computed, and for a fork of a sequence in step.
        """
        inputs = step.inputs
        is_chunk = (step.sampled >= inputs.lengths.num_decodes).tolist()
        ends = inputs.seq_lens[step.sampled].tolist()
        starts = inputs.positions[inputs.query_starts[step.sampled].long()].tolist()
        rows, known = step.rows.tolist(), step.num_known.tolist()
        behind = [
            num_known - self._observe_row(row, start, num_known, end if chunk else None)
            for row, start, num_known, end, chunk in zip(rows, starts, known, ends, is_chunk, strict=True)
        ]
        return np.array(behind, dtype=np.int64)

    def _observe_row(self, row: int, start: int, num_known: int, chunk_end: int | None) -> int:
        """Tokens computed of a row whose step began at `start`."""
        seen = self._rows.get(row)
        if chunk_end is not None:
            num_computed = chunk_end
        elif seen is None or seen.num_known != start + 1:
            num_computed = start
        else:
            num_held = num_known - 1 - seen.num_known
            num_computed = seen.num_computed
            if num_computed == seen.num_known:
                num_computed += min(num_held, seen.num_drafts)
        self._rows[row] = _RowProgress(num_known, num_computed, 0)
        return num_computed

    def computed(self, rows: list[int], num_tokens: NDArray[np.int32], num_drafts: int, num_slots: list[int]) -> None:
        """The draft computed `num_tokens` more known tokens of each row, then so many of its drafts; what lies behind
        `num_slots` tokens was not stored."""
        for row, count, most in zip(rows, num_tokens.tolist(), num_slots, strict=True):
            progress = self._rows[row]
            progress.num_computed = min(progress.num_computed + count, most)
            progress.num_drafts = min(num_drafts, most - progress.num_computed)
