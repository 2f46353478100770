"""A rank says every second that it lives, how far it is, and what it exchanged with others."""

import threading
import time

from kvasir_runtime.heartbeat import BEAT_SECONDS
from kvasir_runtime.parallel.counts import CountsByGroup
from kvasir_runtime.parallel.groups import RankGroups
from kvasir_runtime.ranks.links import RankLinks
from kvasir_runtime.ranks.messages import RankProgress
from kvasir_runtime.ranks.status import RankStatus


class SignsOfLife:
    """From a thread of its own, which runs while steps wait for the device or for other ranks."""

    def __init__(
        self, links: RankLinks, groups: RankGroups, status: RankStatus, beat_seconds: float = BEAT_SECONDS
    ) -> None:
        self._at: tuple[int, int | None] = 0, None
        """Steps that are done, and collectives before the one under way; None: none is."""
        self._links = links
        self._groups = groups
        self._status = status
        self._beat_seconds = beat_seconds
        self.beat()
        threading.Thread(target=self._run, name="signs-of-life", daemon=True).start()

    def begin_step(self) -> None:
        """Collectives count from here: ranks whose captures ended apart agree again."""
        self._at = self._at[0], _num_calls(self._counts())

    def end_step(self) -> None:
        """Until the next begins there are none to count: a rank that has begun it is ahead of one that has not."""
        self._at = self._at[0] + 1, None

    def _run(self) -> None:
        while True:
            time.sleep(self._beat_seconds)
            self.beat()

    def beat(self) -> None:
        """Say it now."""
        (num_steps, num_before), counts = self._at, self._counts()
        self._status.beat(num_steps)
        num_calls = 0 if num_before is None else _num_calls(counts) - num_before
        self._links.send(RankProgress(self._groups.place.rank, num_steps, num_calls, counts))

    def _counts(self) -> CountsByGroup:
        counts: CountsByGroup = {"tensor": self._groups.tensor.counts.copy()}
        if self._groups.link is not None:
            counts["pipeline"] = self._groups.link.counts.copy()
        return counts


def _num_calls(counts: CountsByGroup) -> int:
    return sum(sum(each.calls) for each in counts.values())
