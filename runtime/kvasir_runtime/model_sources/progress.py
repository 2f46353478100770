"""How far a download has come: counted by the threads that read, sampled for whoever watches."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self

State = Literal["resolving", "waiting", "downloading", "verifying", "complete"]
"""waiting: another process fills the cache. verifying: all bytes are there, some are still compared."""
_RATE_WINDOW_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """One sample. Sizes are those of the files wanted, bytes of earlier runs included in `bytes_done`."""

    address: str
    state: State = "resolving"
    bytes_done: int = 0
    bytes_total: int = 0
    """0 before the source has listed its files."""
    bytes_per_second: float = 0.0
    """Over the last half minute."""
    seconds_left: float | None = None
    """None where the rate says nothing of it."""
    idle_seconds: float = 0.0
    """Since the last byte came, or was compared."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(**content)


class ProgressMeter:
    """Thread-safe. `clock` counts seconds."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now = Progress(address)
        self._moved_at = clock()
        self._samples: deque[tuple[float, int]] = deque()  # time, bytes received since the start
        self._received = 0

    def enter(self, state: State) -> None:
        with self._lock:
            self._now = replace(self._now, state=state)

    def begin(self, bytes_total: int) -> None:
        with self._lock:
            self._now = replace(self._now, state="downloading", bytes_done=0, bytes_total=bytes_total)
            self._moved_at = self._clock()
            self._samples.clear()
            self._samples.append((self._moved_at, self._received))

    def add_received(self, num_bytes: int) -> None:
        with self._lock:
            self._received += num_bytes
            self._moved_at = self._clock()
            self._add(num_bytes)

    def note_compared(self, num_bytes: int) -> None:
        """Of a file on disk, with its digest: it is done once all of it was."""
        with self._lock:
            self._moved_at = self._clock()

    def add_kept(self, num_bytes: int) -> None:
        """Of an earlier run; negative for what has to be fetched again."""
        with self._lock:
            self._add(num_bytes)

    def sample(self) -> Progress:
        """To be called regularly: the rate is that since the calls of the last half minute."""
        with self._lock:
            now = self._clock()
            self._samples.append((now, self._received))
            while now - self._samples[0][0] > _RATE_WINDOW_SECONDS:
                self._samples.popleft()
            self._now = replace(self._now, **self._pace(now))
            return self._now

    def _add(self, num_bytes: int) -> None:
        done = self._now.bytes_done + num_bytes
        state: State = "verifying" if done == self._now.bytes_total else "downloading"
        self._now = replace(self._now, bytes_done=done, state=state)

    def _pace(self, now: float) -> dict[str, Any]:
        began, received = self._samples[0]
        rate = (self._received - received) / (now - began) if now > began else 0.0
        left = self._now.bytes_total - self._now.bytes_done
        is_reading = self._now.state == "downloading"
        return {
            "bytes_per_second": rate,
            "seconds_left": left / rate if is_reading and rate > 0 else None,
            "idle_seconds": now - self._moved_at if is_reading else 0.0,
        }


def as_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def describe(progress: Progress) -> str:
    """One line for a log."""
    if not progress.bytes_total:
        waits = "waits for the process that fills the cache" if progress.state == "waiting" else "asks what there is"
        return f"{progress.address}: {waits}"
    share = 100 * progress.bytes_done / progress.bytes_total
    sizes = f"{as_text(progress.bytes_done)} of {as_text(progress.bytes_total)}"
    line = f"{progress.address}: {progress.state}: {sizes} ({share:.0f} %)"
    if progress.state in ("downloading", "waiting"):
        line += f", {progress.bytes_per_second / 1e6:.1f} MB/s"
    return line if progress.seconds_left is None else f"{line}, {progress.seconds_left:.0f} s left"
