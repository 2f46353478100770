"""What no flag sets: times and bounds that its parts have from here, where nothing else is said. Tests shorten them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvasir_router.relay.body import CLIENT_TIMES, LOOP_BYTES, ClientTimes
from kvasir_router.relay.journal import JOURNAL_BOUNDS, JournalBounds
from kvasir_router.remote_prefill import LATE_SECONDS
from kvasir_router.service.health import PROBE_TIMES, ProbeTimes
from kvasir_router.service.peer_settings import PEER_SETTINGS, PeerSettings


@dataclass(frozen=True)
class Tuning:
    clients: ClientTimes = CLIENT_TIMES
    journal: JournalBounds = JOURNAL_BOUNDS
    probes: ProbeTimes = PROBE_TIMES
    peers: PeerSettings = PEER_SETTINGS
    refresh_seconds: float = 1.0
    housekeeping_seconds: float = 10.0
    late_prefill_seconds: float = LATE_SECONDS
    loop_bytes: int = LOOP_BYTES
    memory_limit_bytes: int | None = None
    """Of the process; None: it has none."""
    clock: Callable[[], float] = time.perf_counter
    """By which services forget, eject and place; it may be ahead of time.perf_counter."""


TUNING = Tuning()
