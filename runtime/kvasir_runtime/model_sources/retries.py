"""Trying again what failed in passing: as often in a row as it brings nothing."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvasir_runtime.errors import TransientFetchError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_attempts` in a row that bring nothing; the pause doubles with each."""

    max_attempts: int = 3
    pause_seconds: float = 2.0


def persistently(
    attempt: Callable[[], Result],
    policy: RetryPolicy,
    stopping: threading.Event,
    position: Callable[[], int] = lambda: 0,
) -> Result:
    """What `attempt` returns. An attempt that moved `position` on was not in vain, and counts as the first.

    Raises its last TransientFetchError once it has failed often enough, or `stopping` is set; any other at once.
    """
    num_failures, before = 0, position()
    while True:
        try:
            return attempt()
        except TransientFetchError as error:
            after = position()
            num_failures = 1 if after > before else num_failures + 1
            before = after
            if num_failures >= policy.max_attempts:
                raise
            pause_seconds = policy.pause_seconds * 2 ** (num_failures - 1)
            logger.warning("%s; trying again in %g s", error, pause_seconds)
            if stopping.wait(pause_seconds):
                raise
