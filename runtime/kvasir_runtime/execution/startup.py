"""What starting up tells: how long each phase takes, and which layers are loaded; large checkpoints take minutes."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0


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


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """Says in the log which layers a rank loads, and every few seconds how many it has."""

    rank: str
    """Its name."""
    num_ranks: int
    num_layers: int
    """Of the whole model."""
    clock: Callable[[], float] = time.monotonic

    def over(self, layers: range) -> Iterator[int]:
        """This rank's layers; each has been loaded when the next is asked for."""
        logger.info(
            "%s of %d loads layers %d to %d of %d",
            self.rank, self.num_ranks, layers.start, layers.stop - 1, self.num_layers,
        )  # fmt: skip
        last_told = self.clock()
        for num_loaded, layer in enumerate(layers):
            if (now := self.clock()) - last_told >= PERIOD_SECONDS:
                logger.info("%s: %d of %d layers loaded", self.rank, num_loaded, len(layers))
                last_told = now
            yield layer
