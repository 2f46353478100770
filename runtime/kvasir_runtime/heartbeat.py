"""Signs of life of an engine's processes, in memory that they share.

A process that is stopped, frozen or cannot run falls silent, although nothing of it has ended. One that is only busy
beats on: a long step lets go of the interpreter. Whether work makes progress is another question (`--stall-seconds`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir_runtime.shared_rows import SharedRows

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A process silent for so long is taken for hung."""


class Heartbeats:
    """One process's view: it writes its own slot and reads all. Times are the machine's monotonic clock's."""

    def __init__(self, file: Path, num_processes: int, own_index: int, clock: Callable[[], float] = time.monotonic):
        self._rows = SharedRows(file, num_processes, 1)
        self._own_index = own_index
        self._clock = clock

    def beat(self) -> None:
        self._rows.row(self._own_index)[0] = self._clock()

    def leave(self) -> None:
        """No sign of life is expected any more."""
        self._rows.row(self._own_index)[0] = 0.0

    def silence_of_others_seconds(self) -> float:
        """Of the one silent for longest, among those that have begun and not left."""
        others = (beat for index, beat in enumerate(self._rows.column(0)) if index != self._own_index and beat)
        return max((self._clock() - beat for beat in others), default=0.0)


@contextmanager
def beating(heartbeats: Heartbeats) -> Iterator[None]:
    """Beats while the block runs, at once and then from a thread of its own."""
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.wait(BEAT_SECONDS):
            heartbeats.beat()

    heartbeats.beat()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        heartbeats.leave()


def api_heartbeats(ipc_dir: Path, api_server_count: int, num_cores: int, api_index: int) -> Heartbeats:
    """Of an API process."""
    return Heartbeats(ipc_dir / "heartbeats", api_server_count + num_cores, api_index)


def core_heartbeats(ipc_dir: Path, api_server_count: int, num_cores: int, data_rank: int) -> Heartbeats:
    """Of an engine core."""
    return Heartbeats(ipc_dir / "heartbeats", api_server_count + num_cores, api_server_count + data_rank)
