"""Real engines that exchange KV, each on a host of its own, as a pod is, and what tests ask and tell them."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from benchmarks.exchanging_engine import exchanging
from prometheus_client.parser import text_string_to_metric_families
from tests.loopback import own_host
from tests.plain_http import CLIENT
from tests.runtime.cli.conftest import Server

from kvasir_router.config import KvEventPorts


@contextmanager
def all_ready(engines: Sequence["Engine"]) -> Iterator[None]:
    """They start side by side, and are gone behind the block."""
    try:
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            engine.kill()


class Engine(Server):
    """`connector` as benchmarks.exchanging_engine has it."""

    def __init__(self, model: object, number: int, ports: KvEventPorts, *flags: str, **connector: object) -> None:
        self.host = own_host(number)
        exchange = exchanging(self.host, ports.events, ports.replay, **connector)
        super().__init__(model, "--dtype", "float32", "--max-num-seqs", "8", *exchange, *flags)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes that there are."""
        with suppress(FileNotFoundError, ProcessLookupError):
            signal_all((*self.children(), self.process.pid), number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.end()


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def num_in_flight(engine: Server) -> int:
    return int(CLIENT.get(f"{engine.url}/drain").json()["in_flight_requests"])


def total(server: Server, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(CLIENT.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def num_received(engine: Server) -> float:
    return total(engine, "kvasir_kv_transfer_blocks_total", direction="received")


def num_failed(engine: Server) -> float:
    return total(engine, "kvasir_kv_transfer_failures_total")


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
