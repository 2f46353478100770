"""The story of every scenario that strikes an engine: load, strike, whole again, verdict."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from e2e.conftest import StartLoad
from e2e.engines import Engine, busy_engine, is_whole_without, num_resumed
from e2e.live_cluster import LiveService
from e2e.traffic.answers import Answer, answers
from e2e.traffic.json_requests import JsonRequest
from e2e.traffic.traffic import Verdict
from e2e.watch import watching

NUM_CLIENTS, NUM_TOKENS = 8, 600
WHOLE_WITHIN_SECONDS = 180.0


@dataclass(frozen=True)
class Recovery:
    verdict: Verdict
    whole_again_seconds: float
    """From the strike until as many engines were ready as before."""
    num_resumed: int
    """Streams that went on with another engine than they began with."""


def recover(
    service: LiveService,
    start_load: StartLoad,
    strike: Callable[[Engine], None],
    num_engines: int,
    streams: Sequence[Answer | JsonRequest] | None = None,
) -> Recovery:
    """Strike one of `num_engines` engines in the middle of its streams; None: completions."""
    load = start_load(service, streams or answers(NUM_TOKENS), num_clients=NUM_CLIENTS)
    with load as clients, watching(service.cluster, "pods", service.namespace) as pods:
        victim, resumed_before = busy_engine(service), num_resumed(service)
        struck = time.time()
        strike(victim)
        what = f"{num_engines} ready engines of {service.name} without {victim.pod} as it was"
        whole = pods.first(is_whole_without(victim, num_engines), WHOLE_WITHIN_SECONDS, what, after=struck)
        clients.wait_streams(NUM_CLIENTS)
        return Recovery(clients.stop(), whole - struck, num_resumed(service) - resumed_before)
