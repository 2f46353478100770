"""What a router adds: ours beside sglang-router, smg and vllm-router, and beside none, between one load and engines.

    python benchmarks/router_overhead.py [--rounds 3] [--seconds 5] [--minutes 10] [--also before=/another/tree]

A Go program (`router_overhead/`) is the load generator and the mock engines; they share a core, and the router under
test has another to itself. Every workload visits all routers in turn, and that several times, so that what else the
machine does falls on all alike. The other routers come from the package index, each in an environment of its own.
Rows of "as operated" are ours as the operator starts it, before engines of ours: those keep journals of streams and
tell their tokenizer, and their KV events say that each has all conversations cached.
`--rounds 1 --seconds 2` is a first look, in under three minutes once they are installed; `--only streams --routers`
runs the workloads that have the word in their names, and ours alone. What is not whole is printed and not kept.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import zmq
from servers import WORK, OtherWork, Server, end_on_sigterm, install, this_machine

from kvasir_operator.local.network import free_port
from kvasir_router.config import KvEventPorts
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer, TokenizerCard

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NUM_ENGINES = 4
OURS, NONE = "kvasir", "none"
RIVALS = {"sglang-router": "0.3.2", "smg": "1.13.0", "vllm-router": "0.1.17"}
ANSWER_LIMIT_SECONDS = 60
LONG_BODY = 40_000
BLOCK_SIZE = 16
MODEL = ROOT / "examples" / "models" / "kvasir-python-7m"
SOAK = ("-connections=8", "-rate=50", "-body=40000")
MEMORY_SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Workload:
    connections: int
    body_bytes: int
    tokens: int = 1
    pace_ms: int = 0
    """What an engine takes for a token; 0: nothing."""
    is_stream: bool = False
    watches_memory: bool = False
    as_operated: bool = False

    def __str__(self) -> str:
        return f"as operated, {self._load}" if self.as_operated else self._load

    @property
    def _load(self) -> str:
        size = f"{self.body_bytes} B" if self.body_bytes < 1000 else f"{self.body_bytes // 1000} kB"
        if self.is_stream:
            return f"{self.connections} streams, a chunk every {self.pace_ms} ms"
        return f"{self.connections} at once, {size}" + (f", engine takes {self.pace_ms} ms" if self.pace_ms else "")


@dataclass(frozen=True)
class Sample:
    """What one visit of a workload to a router showed; durations are p50 and p99."""

    requests_per_second: float
    num_requests: int
    num_chunks: int
    num_errors: int
    first_error: str
    latency_ms: tuple[float, float] | None
    chunk_delay_ms: tuple[float, float] | None
    cpu_seconds: float | None = None
    resident_mb: float | None = None


@dataclass(frozen=True)
class Figure:
    name: str
    of: Callable[[Sample], float | None]
    is_added: bool = False
    """What the same round showed without a router is taken off."""
    is_higher_better: bool = False


P50 = Figure("added p50, ms", lambda sample: sample.latency_ms and sample.latency_ms[0], is_added=True)
P99 = Figure("added p99, ms", lambda sample: sample.latency_ms and sample.latency_ms[1], is_added=True)
RATE = Figure("requests/s", lambda sample: sample.requests_per_second, is_higher_better=True)
REQUESTS_A_CPU_SECOND = Figure(
    "requests a CPU second",
    lambda sample: sample.cpu_seconds and sample.num_requests / sample.cpu_seconds,
    is_higher_better=True,
)
CHUNKS_A_CPU_SECOND = Figure(
    "chunks a CPU second",
    lambda sample: sample.cpu_seconds and sample.num_chunks / sample.cpu_seconds,
    is_higher_better=True,
)
DELAY_P50 = Figure("added to a chunk p50, ms", lambda s: s.chunk_delay_ms and s.chunk_delay_ms[0], is_added=True)
DELAY_P99 = Figure("added to a chunk p99, ms", lambda s: s.chunk_delay_ms and s.chunk_delay_ms[1], is_added=True)
RESIDENT = Figure("most resident, MB", lambda sample: sample.resident_mb)
ERRORS = Figure("errors", lambda sample: sample.num_errors)


def workloads(seconds: float) -> dict[Workload, tuple[Figure, ...]]:
    """64 and 512 at once are the same thousand requests a second; without a pace it is as many as are answered."""
    one_stream_all_along = max(1, round(seconds / 0.5))
    return {
        Workload(1, 200): (P50, P99),
        Workload(1, 40_000): (P50, P99),
        Workload(1, 400_000): (P50, P99),
        Workload(64, 200, pace_ms=64): (P50, P99, REQUESTS_A_CPU_SECOND),
        Workload(512, 200, pace_ms=512): (P50, P99, REQUESTS_A_CPU_SECOND),
        Workload(64, 200): (RATE, REQUESTS_A_CPU_SECOND),
        Workload(64, 40_000): (RATE, REQUESTS_A_CPU_SECOND),
        Workload(64, 400_000): (RATE, REQUESTS_A_CPU_SECOND),
        Workload(256, 200, 50, 20, is_stream=True): (DELAY_P50, DELAY_P99, CHUNKS_A_CPU_SECOND),
        Workload(2000, 200, one_stream_all_along, 500, is_stream=True, watches_memory=True): (
            P50,
            DELAY_P99,
            CHUNKS_A_CPU_SECOND,
            RESIDENT,
            ERRORS,
        ),
        Workload(1, LONG_BODY, as_operated=True): (P50, P99),
        Workload(64, LONG_BODY, as_operated=True): (RATE, REQUESTS_A_CPU_SECOND),
        Workload(256, 200, 50, 20, is_stream=True, as_operated=True): (DELAY_P50, DELAY_P99, CHUNKS_A_CPU_SECOND),
    }


@dataclass
class Row:
    is_higher_better: bool
    values: dict[str, list[float]]
    """Router -> a value per round."""


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, name: str, router: str, value: float, *, is_higher_better: bool = False) -> None:
        row = self.rows.setdefault(name, Row(is_higher_better, defaultdict(list)))
        row.values[router].append(value)

    def add_round(self, workload: Workload, figures: tuple[Figure, ...], samples: Mapping[str, Sample]) -> None:
        for figure in figures:
            base = figure.of(samples[NONE]) if figure.is_added else None
            for router, sample in samples.items():
                value = figure.of(sample)
                if value is not None:
                    added = value - base if base is not None and router != NONE else value
                    name = f"{workload}: {figure.name}"
                    self.add(name, router, added, is_higher_better=figure.is_higher_better)

    def render(self, routers: list[str]) -> str:
        others = [router for router in routers if router not in (NONE, OURS)]
        columns = ["", *routers, *(f"{OURS} : {other}" for other in others)]
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name, row in self.rows.items():
            medians = {router: statistics.median(values) for router, values in row.values.items()}
            cells = [shown(medians[router]) if router in medians else "" for router in routers]
            ratios = [ratio(medians, other, row.is_higher_better) for other in others]
            lines.append(f"| {' | '.join([name, *cells, *ratios])} |")
        return "\n".join(lines)


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio(medians: Mapping[str, float], other: str, is_higher_better: bool) -> str:
    """More than 1 is better for ours; nothing where one is missing, or so small that it is noise."""
    ours, theirs = medians.get(OURS, 0.0), medians.get(other, 0.0)
    if min(ours, theirs) <= 0:
        return ""
    return f"{ours / theirs if is_higher_better else theirs / ours:.2f}"


@dataclass(frozen=True)
class Bench:
    program: Path
    engines: Server
    engine_urls: list[str]
    routers: dict[str, Server]

    @property
    def targets(self) -> list[str]:
        return [NONE, *self.routers]

    @property
    def servers(self) -> list[Server]:
        return [self.engines, *self.routers.values()]

    def visit(self, name: str, workload: Workload, seconds: float) -> Sample:
        router = self.routers.get(name)
        cpu_seconds = router.cpu_seconds() if router else 0.0
        load = self.load(
            name,
            f"-connections={workload.connections}",
            f"-seconds={seconds}",
            f"-body={workload.body_bytes}",
            f"-tokens={workload.tokens}",
            f"-pace={workload.pace_ms}",
            f"-stream={str(workload.is_stream).lower()}",
        )
        with load as process:
            most_resident = watch_memory(process, router) if router and workload.watches_memory else None
            report = result_of(process)
        return Sample(
            requests_per_second=report["requests"] / report["seconds"],
            num_requests=report["requests"],
            num_chunks=report["chunks"],
            num_errors=report["errors"],
            first_error=report["first_error"],
            latency_ms=quantiles(report["latency_ms"]),
            chunk_delay_ms=quantiles(report["chunk_delay_ms"]),
            cpu_seconds=router.cpu_seconds() - cpu_seconds if router else None,
            resident_mb=most_resident,
        )

    @contextmanager
    def load(self, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A load generator that runs; at the end of the block it does no more."""
        urls = [self.routers[name].url] if name in self.routers else self.engine_urls
        command = [str(self.program), "load", f"-urls={','.join(urls)}", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def result_of(load: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = load.communicate()
    if load.returncode != 0:
        raise SystemExit(f"the load generator gave status {load.returncode}")
    report: dict[str, Any] = json.loads(output)
    return report


def quantiles(found: Mapping[str, float] | None) -> tuple[float, float] | None:
    return (found["p50"], found["p99"]) if found else None


def watch_memory(load: subprocess.Popen[str], router: Server) -> float:
    most = 0.0
    while load.poll() is None:
        most = max(most, resident_mb(router))
        time.sleep(MEMORY_SAMPLE_SECONDS)
    return most


def resident_mb(server: Server) -> float:
    return server.resident_mib() * 2**20 / 1e6


def main() -> None:
    options = parse_arguments()
    end_on_sigterm()
    head, table, other_work = heading(options), Table(), OtherWork()
    with running(options) as (bench, operated):
        if options.minutes:
            with other_work.than(*bench.servers):
                soak(bench, table, options.minutes)
        for round_number in range(options.rounds):
            for workload, figures in workloads(options.seconds).items():
                if options.only not in str(workload):
                    continue
                which = operated if workload.as_operated else bench
                with other_work.than(*bench.servers, *operated.servers):
                    samples = {
                        name: which.visit(name, workload, options.seconds)
                        for name in rotated(which.targets, round_number)
                    }
                report_round(round_number, workload, samples)
                table.add_round(workload, figures, samples)
        rendered = table.render(bench.targets)
    report = f"{head}\n\n{rendered}\n\nOther work on the cores meanwhile: {other_work}.\n"
    if options.only:
        print(report)
        return
    path = RESULTS / f"router_overhead-{date.today()}{options.tag and '-'}{options.tag}.md"
    path.write_text(report)
    print(f"{report}\nwritten to {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each visit to a router")
    parser.add_argument("--minutes", type=float, default=0.0, help="of a light load under which memory is watched")
    parser.add_argument("--routers", nargs="*", choices=list(RIVALS), default=list(RIVALS), help="beside ours")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=FOLDER", help="our router of another checkout"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose names contain it")
    parser.add_argument("--tag", default="", help="ends the file's name")
    return parser.parse_args()


@contextmanager
def running(options: argparse.Namespace) -> Iterator[tuple[Bench, Bench]]:
    """Engines and routers, started and found to answer, and the same as operated; all are stopped at the end."""
    load_core, router_core = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    program = compiled()
    trees = {OURS: ROOT, **{name: Path(folder) for name, _, folder in (also.partition("=") for also in options.also)}}
    tokenizer = card()
    card_file = WORK / "router_overhead-tokenizer.json"
    card_file.write_bytes(msgspec.json.encode(tokenizer))
    engines, urls = mock_engines(program)
    own_engines, own_urls = mock_engines(program, f"-tokenizer={card_file}")
    ports = KvEventPorts(free_port("127.0.0.1"), free_port("127.0.0.1"))
    routers = {name: our_router(tree, urls) for name, tree in trees.items()}
    routers |= {name: rival(name, urls) for name in options.routers}
    own_routers = {name: our_router(tree, own_urls, ports) for name, tree in trees.items()}
    benches = Bench(program, engines, urls, routers), Bench(program, own_engines, own_urls, own_routers)
    for router in (*routers.values(), *own_routers.values()):
        router.command[:0] = ["taskset", "--cpu-list", str(router_core)]
    os.sched_setaffinity(0, {load_core})  # and with it all that is started from here, but the routers
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with publishing(ports, stored_events(program, tokenizer)):
        try:
            for kind, bench in zip(("", "operated-"), benches, strict=True):
                for name, server in {"engines": bench.engines, **bench.routers}.items():
                    server.start(WORK / f"router_overhead-{kind}{name}.log")
                for name in bench.routers:
                    wait_for_answer(bench, name)
            yield benches
        finally:
            for bench in benches:
                for server in bench.servers:
                    server.stop()


def mock_engines(program: Path, *flags: str) -> tuple[Server, list[str]]:
    ports = [free_port("127.0.0.1") for _ in range(NUM_ENGINES)]
    command = [str(program), "engines", f"-ports={','.join(map(str, ports))}", *flags]
    return Server("engines", command, ports[0]), [f"http://127.0.0.1:{port}" for port in ports]


def card() -> TokenizerCard:
    template = (MODEL / "chat_template.jinja").read_text()
    return TokenizerCard((MODEL / "tokenizer.json").read_text(), "example", template, {"eos_token": "<|im_end|>"})


def stored_events(program: Path, described: TokenizerCard) -> list[Any]:
    """Every conversation's blocks, as vLLM tells of them."""
    texts = subprocess.check_output([str(program), "conversations", f"-body={LONG_BODY}"], text=True).splitlines()
    tokenizer, events = PromptTokenizer(described, PieceCache(2**26)), []
    for number, text in enumerate(texts):
        messages = msgspec.json.encode([{"role": "user", "content": text}])
        tokens = array("I", tokenizer.tokens(Prompt(b"", False, b"", msgspec.Raw(messages))) or b"")
        num_blocks = len(tokens) // BLOCK_SIZE - 2  # the end is another in a longer prompt
        digests = [f"{number} {block}".encode() for block in range(num_blocks)]
        stored = list(tokens[: num_blocks * BLOCK_SIZE])
        events.append(["BlockStored", digests, None, stored, BLOCK_SIZE, None, "GPU"])
    return events


@contextmanager
def publishing(ports: KvEventPorts, events: list[Any]) -> Iterator[None]:
    """All in one message, which was sent before anybody listened and is replayed to whoever asks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    message = ((0).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, events, None]))
    end = ((-1).to_bytes(8, "big", signed=True), b"")
    live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    live.bind(f"tcp://127.0.0.1:{ports.events}")
    replay.bind(f"tcp://127.0.0.1:{ports.replay}")

    def serve() -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                client, empty, start = replay.recv_multipart()
                for answer in (message, end) if start == message[0] else (end,):
                    replay.send_multipart((client, empty, *answer))
        replay.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        live.close(linger=0)
        context.term()
        thread.join()


def compiled() -> Path:
    program = WORK / "router_overhead"
    subprocess.run(["go", "build", "-o", str(program), "."], cwd=Path(__file__).with_suffix(""), check=True)
    return program


def our_router(tree: Path, engine_urls: list[str], ports: KvEventPorts | None = None) -> Server:
    """`ports`: as the operator starts it."""
    port = free_port("127.0.0.1")
    command = [
        sys.executable, "-m", "kvasir_router", "serve", "--model", "m", "--port", str(port),
        "--admin-port", str(free_port("127.0.0.1")), "--log-level", "warning",
        *(part for url in engine_urls for part in ("--endpoint", url)),
        *(() if ports is None else ("--kv-events", f"{ports.events}:{ports.replay}")),
    ]  # fmt: skip
    return Server(OURS, command, port, {"PYTHONPATH": str(tree / "router")}, ready_path="/v1/models")


def rival(name: str, engine_urls: list[str]) -> Server:
    python = install(WORK / f"{name}-{RIVALS[name]}", [f"{name}=={RIVALS[name]}"])
    start = {
        "sglang-router": [str(python), "-m", "sglang_router.launch_router", "--log-level", "warn"],
        "smg": [str(python.parent / "smg"), "launch", "--log-level", "warn"],
        "vllm-router": [str(python.parent / "vllm-router"), "--log-level", "warning"],
    }
    port = free_port("127.0.0.1")
    command = [
        *start[name], "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
        "--prometheus-port", str(free_port("127.0.0.1")), "--policy", "cache_aware", "--worker-urls", *engine_urls,
    ]  # fmt: skip
    return Server(name, command, port, ready_path="/v1/models")


def wait_for_answer(bench: Bench, name: str) -> None:
    begin = time.monotonic()
    while (error := first_error(bench, name)) is not None:
        if time.monotonic() - begin > ANSWER_LIMIT_SECONDS:
            raise SystemExit(f"{name} answers no completion within {ANSWER_LIMIT_SECONDS} s: {error}")


def first_error(bench: Bench, name: str) -> str | None:
    with bench.load(name, "-seconds=0.2") as load:
        report = result_of(load)
    return report["first_error"] if report["errors"] else None


def soak(bench: Bench, table: Table, minutes: float) -> None:
    """All routers at once, as memory is watched and not time."""

    def note(when: str) -> None:
        for name, router in bench.routers.items():
            table.add(f"resident {when}, MB", name, resident_mb(router))

    note("when ready")
    with ExitStack() as stack:
        loads = [stack.enter_context(bench.load(name, f"-seconds={minutes * 60}", *SOAK)) for name in bench.routers]
        time.sleep(minutes * 6)
        note(f"after {minutes / 10:g} minutes of 50 requests/s of 40 kB")
        for load in loads:
            result_of(load)
    note(f"after {minutes:g} minutes of them")


def rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def report_round(round_number: int, workload: Workload, samples: Mapping[str, Sample]) -> None:
    for name, sample in samples.items():
        print(f"round {round_number}, {workload}, {name}: {sample}", flush=True)


def heading(options: argparse.Namespace) -> str:
    rivals = ", ".join(f"{name} {RIVALS[name]}" for name in options.routers)
    beside = f"{rivals} with policy cache_aware, ours" if rivals else "Ours"
    return f"""# What routers add, {date.today()}

`python benchmarks/router_overhead.py {" ".join(sys.argv[1:])}` at {this_machine()}.

{beside} with its own policy; {NUM_ENGINES} mock engines. The router is pinned to one core, load
generator and engines share the other. "None" is the same load without a router: its own figures, which are taken off
what is called added. Half of each prompt is one of 32 conversations, the rest was never asked before. Medians of
{options.rounds} rounds of {options.seconds:g} s; a ratio above 1 is better for ours."""


if __name__ == "__main__":
    main()
