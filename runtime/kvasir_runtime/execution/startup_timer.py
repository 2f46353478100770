"""How long each phase of starting up takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartupTimer:
    """`seconds` of a phase leave out the phases measured within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self._running.append(phase)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._running.pop()
            self._add(phase, elapsed)
            if self._running:
                self._add(self._running[-1], -elapsed)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
