"""What the ranks of a node show in memory to the process that started them, which may have no link to the core.

Silence counts only while the watcher itself runs, as in liveness.py.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir_runtime.heartbeat import SILENT_SECONDS
from kvasir_runtime.parallel.topology import RankPlace
from kvasir_runtime.ranks.liveness import MOST_AT_ONCE
from kvasir_runtime.shared_rows import SharedRows

_BEATS, _IS_READY, _NUM_STEPS, _NUM_SLOTS = range(4)


class RankStatus:
    """Of one rank, among `num_ranks` of the node, those of all engines."""

    def __init__(self, file: Path, num_ranks: int, index: int) -> None:
        self._row = SharedRows(file, num_ranks, _NUM_SLOTS).row(index)

    def beat(self, num_steps: int) -> None:
        self._row[_NUM_STEPS] = num_steps
        self._row[_BEATS] += 1

    def set_ready(self) -> None:
        self._row[_IS_READY] = 1


class NodeStatus:
    """Of all ranks of the node."""

    def __init__(self, file: Path, places: Sequence[RankPlace], clock: Callable[[], float] = time.monotonic) -> None:
        self.places = sorted(places, key=lambda place: place.local_rank)
        self._rows = SharedRows(file, len(places), _NUM_SLOTS)
        self._clock = clock
        self._last_look = clock()
        self._num_beats = [0.0] * len(places)
        """Seen so far."""
        self._silence_seconds = [0.0] * len(places)

    @property
    def is_ready(self) -> bool:
        return all(self._rows.column(_IS_READY))

    @property
    def num_steps(self) -> list[int]:
        """Of each rank."""
        return [int(number) for number in self._rows.column(_NUM_STEPS)]

    def silent_rank(self) -> str | None:
        """One that has begun and then gave no sign of life, as a sentence; to be asked every beat or so."""
        self._look()
        for place, silence in zip(self.places, self._silence_seconds, strict=True):
            if silence > SILENT_SECONDS:
                return f"{place.name} has given no sign of life for {silence:.0f} seconds"
        return None

    def _look(self) -> None:
        now = self._clock()
        seconds, self._last_look = min(now - self._last_look, MOST_AT_ONCE), now
        for index, num_beats in enumerate(self._rows.column(_BEATS)):
            is_heard = num_beats != self._num_beats[index] or not num_beats
            self._num_beats[index] = num_beats
            self._silence_seconds[index] = 0.0 if is_heard else self._silence_seconds[index] + seconds
