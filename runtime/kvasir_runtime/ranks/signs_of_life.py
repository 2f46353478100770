"""A rank says every second that it lives, how far it is, and what it exchanged with others."""

import threading
import time

from kvasir_runtime.heartbeat import BEAT_SECONDS
from kvasir_runtime.parallel.counts import CollectiveCounts, Group
from kvasir_runtime.parallel.groups import RankGroups
from kvasir_runtime.ranks.links import RankLinks
from kvasir_runtime.ranks.messages import RankProgress
from kvasir_runtime.ranks.status import RankStatus


class SignsOfLife:
    """From a thread of its own, which runs while steps wait for the device or for other ranks."""

    def __init__(self, links: RankLinks, groups: RankGroups, status: RankStatus) -> None:
        self.num_steps = 0
        """Counted up by the thread that runs them."""
        self._links = links
        self._groups = groups
        self._status = status
        self._beat()
        threading.Thread(target=self._run, name="signs-of-life", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._beat()

    def _beat(self) -> None:
        groups = self._groups
        self._status.beat(self.num_steps)
        counts: dict[Group, CollectiveCounts] = {"tensor": groups.tensor.counts.copy()}
        if groups.link is not None:
            counts["pipeline"] = groups.link.counts.copy()
        self._links.send(RankProgress(groups.place.rank, self.num_steps, counts))
