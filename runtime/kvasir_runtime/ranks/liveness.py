"""Which rank has fallen silent or got stuck, from signs of life and counted work. Reads no clock.

Time counts only while the watcher itself runs: a node that stood still as a whole has lost nobody.
"""

from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS

MOST_AT_ONCE = 2 * BEAT_SECONDS
"""Between two looks."""
AWAITED_SECONDS = 20.0
"""For a rank that all others of its tensor group wait for, or a third of a longer stall time. They do equal work from
one collective to the next: what may take longer on one of them is to compile a kernel, or an expert that many tokens go
to."""


class RankLiveness:
    def __init__(
        self, num_ranks: int, stall_seconds: float, tensor_size: int = 1, awaited_seconds: float = AWAITED_SECONDS
    ) -> None:
        """`tensor_size` neighbours each share layers, and take part in the same collectives."""
        self._tensor_size = tensor_size
        self._stall_seconds = max(stall_seconds, SILENT_SECONDS)
        self._awaited_seconds = max(awaited_seconds, stall_seconds / 3)
        self._silence: list[float | None] = [None] * num_ranks
        """Seconds since the last sign of life; None before the first."""
        self._work = [(0, 0)] * num_ranks
        """Steps that are done, collectives that are begun in the next."""
        self._awaited = [0.0] * num_ranks
        """Seconds without progress, while all others of the tensor group were ahead."""
        self._num_sent = 0
        self._awaits_results = False
        self._since_progress = 0.0

    def hear(self, rank: int, num_steps: int, num_collectives: int) -> None:
        """A long step makes progress from one collective to the next. They are counted since it began."""
        self._silence[rank] = 0.0
        if (num_steps, num_collectives) != self._work[rank]:
            self._work[rank] = num_steps, num_collectives
            self._awaited[rank] = 0.0
            self._since_progress = 0.0

    def sent(self, num_steps: int, awaits_results: bool = False) -> None:
        """So many steps in all have been handed to the ranks; on CUDA they are done with one that the device is not."""
        self._num_sent = num_steps
        self._awaits_results = awaits_results

    def pass_time(self, seconds: float) -> None:
        seconds = min(seconds, MOST_AT_ONCE)
        self._silence = [None if silence is None else silence + seconds for silence in self._silence]
        self._awaited = [
            awaited + seconds if self._is_awaited(rank) else 0.0 for rank, awaited in enumerate(self._awaited)
        ]
        is_idle = min(self._work)[0] >= self._num_sent and not self._awaits_results
        self._since_progress = 0.0 if is_idle else self._since_progress + seconds

    def problem(self) -> str | None:
        """What is wrong with which rank, as a sentence."""
        for rank, silence in enumerate(self._silence):
            if silence is not None and silence > SILENT_SECONDS:
                return f"rank {rank} has given no sign of life for {silence:.0f} seconds ({self._progress})"
        for rank, awaited in enumerate(self._awaited):
            if awaited > self._awaited_seconds:
                return f"rank {rank} has been awaited by its tensor group for {awaited:.0f} seconds ({self._progress})"
        if self._since_progress > self._stall_seconds:
            return f"no rank has made progress for {self._since_progress:.0f} seconds ({self._progress})"
        return None

    def _is_awaited(self, rank: int) -> bool:
        """In the middle of a step that all others of its tensor group are done with, or wait in."""
        if self._tensor_size == 1 or self._work[rank][0] >= self._num_sent:
            return False
        first = rank // self._tensor_size * self._tensor_size
        others = (other for other in range(first, first + self._tensor_size) if other != rank)
        return all(self._work[other] > self._work[rank] for other in others)

    @property
    def _progress(self) -> str:
        ranks = (f"rank {rank}: {steps} steps, {calls} collectives" for rank, (steps, calls) in enumerate(self._work))
        return f"{self._num_sent} steps begun; {'; '.join(ranks)}"
