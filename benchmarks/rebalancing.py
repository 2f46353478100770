"""An engine whose KV is full of long answers, and a second one that comes: with and without streams being handed over.

    python benchmarks/rebalancing.py --rounds 1

Two engines of a core each and the router in this process, which is told of the second engine after some seconds, as by
Kubernetes when a service grows; short questions come all the while. Then the same with room for all from the beginning,
where nothing should change. Prints a table; load generator and router run on the engines' cores.
"""

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from exchanging_engine import exchanging
from random_models import make_model
from servers import WORK, Server, end_on_sigterm
from workloads import new_session, p99, prompt, stream

from kvasir_operator.local.network import free_port
from kvasir_router.config import KvEventPorts, RouterConfig, Switch
from kvasir_router.endpoints.address import Address
from kvasir_router.server import RunningRouter, running, set_up_logging
from kvasir_router.service.rebalancing import Outcome

MODEL = "llama-100m"
NUM_PROMPT_TOKENS = 64
SHORT_OUTPUT_TOKENS = 16
SHORT_SECONDS = 0.5
"""Between two of the short questions."""
SECOND_ENGINE_SECONDS = 3.0
"""From the first long request until the router knows the second engine."""


@dataclass(frozen=True)
class Scenario:
    name: str
    num_long: int
    num_long_tokens: int
    has_both_from_the_beginning: bool


SCENARIOS = (
    Scenario("full, then a second engine", 8, 2000, has_both_from_the_beginning=False),
    Scenario("room from the beginning", 4, 600, has_both_from_the_beginning=True),
)


class Engine(Server):
    def __init__(self, number: int, model: Path, num_blocks: int, ports: KvEventPorts) -> None:
        self.host, port = f"127.0.0.{number + 2}", free_port("127.0.0.1")
        command = [
            "taskset", "-c", str(number % (os.cpu_count() or 1)),
            str(Path(sys.executable).parent / "kvasir-runtime"), "serve", str(model), "--served-model-name", "m",
            "--port", str(port), "--device", "cpu", "--num-gpu-blocks-override", str(num_blocks),
            *exchanging(self.host, ports.events, ports.replay),
        ]  # fmt: skip
        super().__init__(f"engine-{number}", command, port, {"OMP_NUM_THREADS": "1"}, "/ready")

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass
class Seen:
    long: list[list[float]] = field(default_factory=list)
    short: list[list[float]] = field(default_factory=list)
    outcomes: dict[Outcome, int] = field(default_factory=dict)

    def row(self, scenario: str, rebalancing: str) -> str:
        ends = [times[-1] - times[0] for times in self.long]
        gaps = [later - earlier for times in self.long for earlier, later in pairwise(times[1:])]
        waits = [times[1] - times[0] for times in self.short]
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in self.outcomes.items() if number) or "none"
        return (
            f"| {scenario} | {rebalancing} | {max(ends):.1f} | {fmean(ends):.1f} | {p99(gaps) * 1000:.0f} "
            f"| {max(gaps):.2f} | {fmean(waits):.2f} | {max(waits):.2f} | {outcomes} |"
        )


HEAD = (
    "| | streams handed over | last long answer, s | mean | between its tokens, p99, ms | longest pause, s "
    "| short TTFT mean, s | longest | moves |"
)


async def play(engines: list[Engine], ports: KvEventPorts, scenario: Scenario, switch: Switch, seed: str) -> Seen:
    urls = tuple(engine.url for engine in engines)
    config = RouterConfig(port=0, admin_port=0, endpoint=urls, kv_events=ports, rebalancing=switch)
    seen = Seen()
    async with running(config) as router, new_session() as session:
        for engine in engines:  # what an idle engine says of itself every 10 s, it says now
            await stream(session, engine.url, prompt(f"{seed} {engine.name}", NUM_PROMPT_TOKENS), 64)
        await _known(router, urls)
        if not scenario.has_both_from_the_beginning:
            _publish(router, urls[:1])
        long = [
            asyncio.create_task(
                stream(session, router.url, prompt(f"{seed} {n}", NUM_PROMPT_TOKENS), scenario.num_long_tokens)
            )
            for n in range(scenario.num_long)
        ]
        begin, short = time.perf_counter(), []
        while not all(task.done() for task in long):
            if time.perf_counter() - begin > SECOND_ENGINE_SECONDS:
                _publish(router, urls)
                tokens = prompt(f"{seed} short {len(short)}", NUM_PROMPT_TOKENS)
                short.append(asyncio.create_task(stream(session, router.url, tokens, SHORT_OUTPUT_TOKENS)))
            await asyncio.sleep(SHORT_SECONDS)
        seen.long, seen.short = await asyncio.gather(*long), await asyncio.gather(*short)
        (service,) = router.services
        seen.outcomes = service.rebalancing.num_by_outcome
    return seen


async def _known(router: RunningRouter, urls: tuple[str, ...]) -> None:
    (service,) = router.services
    async with asyncio.timeout(30):
        while not all(one["kv_transfer_port"] and one["state"] == "ready" for one in service.describe()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _publish(router: RunningRouter, urls: tuple[str, ...]) -> None:
    """As discovery does."""
    router.services.publish({Address(url) for url in urls})  # type: ignore[attr-defined]


@contextmanager
def _engines(num_blocks: int, ports: KvEventPorts) -> Iterator[list[Engine]]:
    model = make_model(MODEL, WORK / "models")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        engines = [Engine(number, model, num_blocks, ports) for number in range(2)]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start(Path(logs) / f"{engine.name}.log")
        yield engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=480, help="of 16 tokens of KV, of each engine")
    arguments = parser.parse_args()
    end_on_sigterm()
    set_up_logging("error")
    ports = KvEventPorts(free_port("127.0.0.1"), free_port("127.0.0.1"))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {MODEL}, {arguments.blocks} blocks\n")
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    with _engines(arguments.blocks, ports) as engines:
        for number in range(arguments.rounds):
            for scenario in SCENARIOS:
                for switch in ("off", "on"):
                    seed = f"{number} {scenario.name} {switch}"
                    seen = asyncio.run(play(engines, ports, scenario, switch, seed))
                    print(seen.row(scenario.name, switch), flush=True)


if __name__ == "__main__":
    main()
