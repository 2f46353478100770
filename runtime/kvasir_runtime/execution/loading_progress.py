"""Says in the log which layers a rank loads, and every few seconds how many it has: large checkpoints take minutes."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LoadingProgress:
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
