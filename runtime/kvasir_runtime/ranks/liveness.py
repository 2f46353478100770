"""Which rank has fallen silent or got stuck, from signs of life and counted work. Reads no clock.

Silence counts only while the watcher itself runs: a node that stood still as a whole has lost nobody.
"""

from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS

MOST_AT_ONCE = 2 * BEAT_SECONDS
"""Of silence, between two looks."""


class RankLiveness:
    def __init__(self, num_ranks: int, stall_seconds: float) -> None:
        self._stall_seconds = max(stall_seconds, SILENT_SECONDS)
        self._silence: list[float | None] = [None] * num_ranks
        """Seconds since the last sign of life; None before the first."""
        self._num_steps = [0] * num_ranks
        self._num_collectives = [0] * num_ranks
        self._num_sent = 0
        self._since_progress = 0.0

    def hear(self, rank: int, num_steps: int, num_collectives: int) -> None:
        """A long step makes progress from one collective to the next."""
        self._silence[rank] = 0.0
        if (num_steps, num_collectives) != (self._num_steps[rank], self._num_collectives[rank]):
            self._num_steps[rank], self._num_collectives[rank] = num_steps, num_collectives
            self._since_progress = 0.0

    def sent(self, num_steps: int) -> None:
        """So many steps in all have been handed to the ranks."""
        self._num_sent = num_steps

    def pass_time(self, seconds: float) -> None:
        seconds = min(seconds, MOST_AT_ONCE)
        self._silence = [None if silence is None else silence + seconds for silence in self._silence]
        is_idle = min(self._num_steps) >= self._num_sent
        self._since_progress = 0.0 if is_idle else self._since_progress + seconds

    def problem(self) -> str | None:
        """What is wrong with which rank, as a sentence."""
        for rank, silence in enumerate(self._silence):
            if silence is not None and silence > SILENT_SECONDS:
                return f"rank {rank} has given no sign of life for {silence:.0f} seconds ({self._progress})"
        if self._since_progress > self._stall_seconds:
            return f"no rank has made progress for {self._since_progress:.0f} seconds ({self._progress})"
        return None

    @property
    def _progress(self) -> str:
        seen = zip(self._num_steps, self._num_collectives, strict=True)
        ranks = (f"rank {rank}: {steps} steps, {calls} collectives" for rank, (steps, calls) in enumerate(seen))
        return f"{self._num_sent} steps begun; {'; '.join(ranks)}"
