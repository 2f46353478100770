"""Signs of life of an engine's processes, in memory that they share.

A process that is stopped, frozen or cannot run falls silent, although nothing of it has ended. One that is only busy
beats on: a long step lets go of the interpreter. Whether work makes progress is another question (`--stall-seconds`).
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A process silent for so long is taken for hung."""
_SLOT_BYTES = 8


class Heartbeats:
    """One process's view: it writes its own slot and reads all. Times are the machine's monotonic clock's."""

    def __init__(self, file: Path, num_processes: int, own_index: int, clock: Callable[[], float] = time.monotonic):
        """Maps the file; whoever comes first makes it."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, num_processes * _SLOT_BYTES)  # the same size from everyone; new bytes are zero
            self._last_beats = memoryview(mmap.mmap(descriptor, num_processes * _SLOT_BYTES)).cast("d")
        finally:
            os.close(descriptor)
        self._own_index = own_index
        self._clock = clock

    def beat(self) -> None:
        self._last_beats[self._own_index] = self._clock()

    def leave(self) -> None:
        """No sign of life is expected any more."""
        self._last_beats[self._own_index] = 0.0

    def silence_of_others_seconds(self) -> float:
        """Of the one silent for longest, among those that have begun and not left."""
        others = (beat for index, beat in enumerate(self._last_beats) if index != self._own_index and beat)
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


def engine_heartbeats(ipc_dir: Path, api_server_count: int, api_index: int | None = None) -> Heartbeats:
    """Of an API process, or of the engine core (None)."""
    own_index = api_server_count if api_index is None else api_index
    return Heartbeats(ipc_dir / "heartbeats", api_server_count + 1, own_index)
