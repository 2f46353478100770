"""What steps of a batch size take, by the drafts that they verify a request."""

import numpy as np

from kvasir_runtime.speculative.acceptance import FloatArray

PROBE_STEPS = 3
"""Steps of one kind that are timed before their time is believed: the fastest of them."""
FASTER, SLOWER = 0.25, 0.06
"""Weights of a later step that took less, or more, than is believed: what else the machine does only makes steps
slower, and a plain step believed too slow would make drafts look free."""


class CostTable:
    """A step without drafts does no drafting work at all, so that the difference is the whole cost of drafting:
    verifying, guessing, and following the target. Another size's table is believed until drafts are timed here."""

    def __init__(self, max_depth: int, believed: "CostTable | None" = None) -> None:
        self._places = np.arange(max_depth + 1)
        """Drafts a request, rounded; those of a step that drafts at all to 1 at least."""
        self._seconds = np.zeros(max_depth + 1)
        self._num_timed = np.zeros(max_depth + 1, dtype=np.int64)
        self._believed = None if believed is None else believed.ratios()

    @property
    def plain_seconds(self) -> float:
        return float(self._seconds[0])

    @property
    def is_plain_timed(self) -> bool:
        return bool(self._num_timed[0] >= PROBE_STEPS)

    @property
    def num_drafted(self) -> int:
        """Steps with drafts that were timed since `forget_drafted`."""
        return int(self._num_timed[1:].sum())

    @property
    def is_known(self) -> bool:
        return self.is_plain_timed and (self.num_drafted >= PROBE_STEPS or self._believed is not None)

    def add(self, depth: float, seconds: float) -> None:
        """A step that verified `depth` drafts a request on average took so long."""
        place = max(1, round(depth)) if depth else 0
        believed = self._seconds[place]
        self._num_timed[place] += 1
        if self._num_timed[place] == 1 or (self._num_timed[place] <= PROBE_STEPS and seconds < believed):
            self._seconds[place] = seconds
        elif self._num_timed[place] > PROBE_STEPS:
            weight = FASTER if seconds < believed else SLOWER
            self._seconds[place] += weight * (min(seconds, 2 * believed) - believed)

    def forget_drafted(self) -> None:
        """Time steps with drafts anew; until then what was known of them is believed."""
        self._believed = self.ratios()
        self._num_timed[1:] = 0

    def ratios(self) -> FloatArray | None:
        """Of all places' steps to the plain one's; None: nothing is known."""
        return self.seconds(self._places.astype(np.float64)) / self.plain_seconds if self.is_known else None

    def seconds(self, depths: FloatArray) -> FloatArray:
        """Of steps that verify so many drafts a request on average. Between depths that were timed along a line, beyond
        them as if drafting at all cost as much as a draft; no shallower step takes longer than a deeper one."""
        at = np.maximum(depths, 1.0)
        known = 1 + np.flatnonzero(self._num_timed[1:] >= min(PROBE_STEPS, self._num_timed[1:].max()))
        if self.num_drafted >= PROBE_STEPS:
            extra = np.minimum.accumulate(self._seconds[known][::-1])[::-1] - self.plain_seconds
            scale = (1 + at) / (1 + at.clip(known[0], known[-1]))
            drafted = self.plain_seconds + np.interp(at, known, np.maximum(extra, 0.0)) * scale
        else:
            drafted = self.plain_seconds * np.interp(at, self._places, self._believed)  # type: ignore[arg-type]
        return np.where(depths > 0, drafted, self.plain_seconds)
