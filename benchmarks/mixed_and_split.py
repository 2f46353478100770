"""Two engines that do everything beside one that prefills and one that decodes (a part of disaggregation.py).

Both ways have a core for each of their two engines, and the real router in front, placing by its own costs. The trace's
prompts, answers and the blocks that prompts share are divided to fit the model, and its arrivals sped up or slowed down
to a rate; how busy the engines then are tells whether that was too much or too little. Load generator and router run on
the engines' cores, as does everything else on the machine: how much that was is said.
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families
from servers import OtherWork, Server
from workloads import FIRST_ID, LAST_ID, new_session, p99, stream

from kvasir_operator.local.network import free_port

TRACE_BLOCK_TOKENS = 512
"""Of a hash id in the trace, before it is scaled."""
TRACE_TICK_SECONDS = 3.0
"""To which the trace's arrivals are rounded."""
MIN_OUTPUT_TOKENS = 8
MAX_MODEL_LEN = 4096
MAX_PROMPT_TOKENS = MAX_MODEL_LEN - 512
KV_CACHE_GIB = 1
NUM_WARM_UPS = 6
"""Requests before the trace, by which the router learns what prefills and transfers cost."""
HOST = "127.0.0.1"

Way = Literal["mixed", "split by cost", "split always"]
WAYS: tuple[Way, ...] = ("mixed", "split by cost", "split always")


@dataclass(frozen=True)
class Arrival:
    at_seconds: float
    token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True)
class Trace:
    arrivals: list[Arrival]
    scaling: str
    """How it was made of the file, for people."""


def read_trace(file: Path, num_requests: int, rate: float, input_divisor: int, output_divisor: int) -> Trace:
    """The first requests of a trace in Mooncake's form, at so many a second on average."""
    rows = [json.loads(line) for line in file.read_text().splitlines()[:num_requests]]
    in_trace = _spread([row["timestamp"] / 1000 for row in rows])
    seconds_in_trace = in_trace[-1] - in_trace[0]
    slower = (num_requests - 1) / rate / seconds_in_trace
    block_tokens = TRACE_BLOCK_TOKENS // input_divisor
    arrivals = [
        Arrival(
            (seconds - in_trace[0]) * slower,
            _prompt(row["hash_ids"], row["input_length"] // input_divisor, block_tokens),
            max(MIN_OUTPUT_TOKENS, row["output_length"] // output_divisor),
        )
        for seconds, row in zip(in_trace, rows, strict=True)
    ]
    scaling = (
        f"The first {num_requests} requests of {file.name}: prompts of 1/{input_divisor} of their length, cut at "
        f"{MAX_PROMPT_TOKENS} tokens, with prefixes in common by blocks of {block_tokens}; answers of "
        f"1/{output_divisor} of their length, at least {MIN_OUTPUT_TOKENS}; arrivals spread evenly over each tick of "
        f"{TRACE_TICK_SECONDS:g} s, then {slower:.2f} times as far apart: {rate:g} a second on average."
    )
    return Trace(arrivals, scaling)


def _spread(ticks: list[float]) -> list[float]:
    """Seconds of arrivals that were rounded down to a tick: its n arrivals take an nth of it each."""
    num_in_tick, num_before = Counter(ticks), Counter[float]()
    seconds = []
    for tick in ticks:
        seconds.append(tick + TRACE_TICK_SECONDS * num_before[tick] / num_in_tick[tick])
        num_before[tick] += 1
    return seconds


def _prompt(hash_ids: list[int], num_tokens: int, block_tokens: int) -> list[int]:
    """Equal hash ids give equal tokens; cut to what leaves room for an answer."""
    tokens: list[int] = []
    for hash_id in hash_ids:
        rng = random.Random(hash_id)
        tokens += [rng.randint(FIRST_ID, LAST_ID) for _ in range(block_tokens)]
    return tokens[: max(1, min(num_tokens, MAX_PROMPT_TOKENS))]


# Servers


@contextlib.contextmanager
def running(way: Way, model: Path, work: Path) -> Iterator[tuple[Server, list[Server]]]:
    """The router and both engines, ready."""
    with ExitStack() as stack:
        engines, transfer_port = [], free_port(HOST)
        for index, core in enumerate(sorted(os.sched_getaffinity(0))[:2]):
            engines.append(new_engine(model, core, transfer_flags(way, index, transfer_port)))
        router = new_router(way, [engine.url for engine in engines], transfer_port)
        for server in (*engines, router):
            stack.callback(server.stop)
            server.start(work / f"disaggregation-{server.name}.log")
        yield router, engines


def new_engine(
    model: Path, core: int, flags: Sequence[str], program: Sequence[str] = ("-m", "kvasir_runtime")
) -> Server:
    """`flags` have the last word."""
    port = free_port(HOST)
    command = [
        "taskset", "-c", str(core), sys.executable, *program, "serve", str(model),
        "--served-model-name", "m", "--port", str(port), "--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30), *flags,
    ]  # fmt: skip
    return Server(f"engine-{core}", command, port, ready_path="/ready")


def transfer_flags(way: Way, index: int, port: int) -> list[str]:
    if way == "mixed":
        return []
    role, own_port = ("kv_producer", port) if index == 0 else ("kv_consumer", 0)
    extra = {"side_channel_host": HOST, "side_channel_port": own_port}
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]


def new_router(way: Way, engine_urls: list[str], transfer_port: int, protocol: str = "kvasir") -> Server:
    port = free_port(HOST)
    flags = ["--endpoint"] * 2 if way == "mixed" else ["--prefill-endpoint", "--decode-endpoint"]
    command = [
        sys.executable, "-m", "kvasir_router", "serve", "--model", "m", "--port", str(port),
        "--admin-port", str(free_port(HOST)), "--log-level", "warning", "--kv-transfer-port", str(transfer_port),
        "--kv-transfer-protocol", protocol,
        *(part for flag, url in zip(flags, engine_urls, strict=True) for part in (flag, url)),
        *(["--remote-prefill-min-tokens", "0"] if way == "split always" else []),
    ]  # fmt: skip
    return Server("router", command, port, ready_path="/v1/models")


# One run of the trace


@dataclass
class Seen:
    """By the clients of one way, over all rounds."""

    first_token_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_pulled_mib: float = 0.0
    num_failed_pulls: float = 0.0
    seconds: float = 0.0
    engine_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """That each engine's processes computed."""
    num_chunks: int = 0

    def add(self, times: list[float]) -> None:
        """Of one stream: when it was sent, and when each chunk came."""
        self.num_requests += 1
        self.first_token_ms.append(1000 * (times[1] - times[0]))
        self.gap_ms += [1000 * (later - earlier) for earlier, later in pairwise(times[1:])]
        self.num_chunks += len(times) - 1


async def warm_up(url: str, arrivals: list[Arrival], round_number: int) -> None:
    async with new_session() as client:
        for number in range(NUM_WARM_UPS):
            rng = random.Random(f"warm-up {round_number} {number}")
            tokens = [rng.randint(FIRST_ID, LAST_ID) for _ in arrivals[number % len(arrivals)].token_ids]
            await stream(client, url, tokens, MIN_OUTPUT_TOKENS)


async def play(url: str, arrivals: list[Arrival]) -> list[list[float]]:
    """Every stream's times. An answer that fails ends the benchmark."""
    async with new_session() as client:
        began, tasks = time.perf_counter(), []
        for arrival in arrivals:
            await asyncio.sleep(began + arrival.at_seconds - time.perf_counter())
            tasks.append(asyncio.create_task(stream(client, url, arrival.token_ids, arrival.num_output_tokens)))
        return await asyncio.gather(*tasks)


def mixed_and_split(model: Path, trace: Trace, ways: Sequence[Way], num_rounds: int, work: Path) -> str:
    """A table, a row for each way; the ways take turns."""
    seen, other_work, arrivals = {way: Seen() for way in ways}, OtherWork(), trace.arrivals
    for round_number in range(num_rounds):
        for way in ways:
            with running(way, model, work) as (router, engines):
                asyncio.run(warm_up(router.url, arrivals, round_number))
                with other_work.than(router, *engines):
                    play_seen(seen[way], router, engines, arrivals)
            print(f"round {round_number}, {way}: {_row(way, seen[way])}", flush=True)
    lengths = [len(arrival.token_ids) for arrival in arrivals]
    return "\n".join([
        f"## Mixed and split engines, a core each, {len(arrivals)} requests over {arrivals[-1].at_seconds:.0f} s "
        f"({num_rounds} rounds)",
        "",
        trace.scaling,
        f"Prompts then have {statistics.mean(lengths):.0f} tokens on average and at most {max(lengths)}, answers "
        f"{statistics.mean(arrival.num_output_tokens for arrival in arrivals):.0f}. Other work kept {other_work} busy.",
        "",
        "| engines | TTFT p50, ms | p99 | ITL p50, ms | p99 | chunks a second | busy: first engine | second "
        "| pulled, MiB | failed pulls |",
        "|---" * 10 + "|",
        *(_row(way, seen[way]) for way in ways),
        "",
        "Of split engines the first prefills and the second decodes.",
    ])  # fmt: skip


def play_seen(seen: Seen, router: Server, engines: list[Server], arrivals: list[Arrival]) -> None:
    before = [engine.cpu_seconds() for engine in engines]
    pulled, failed = _pulled_mib(engines[1]), _failed_pulls(engines[1])
    began = time.perf_counter()
    for times in asyncio.run(play(router.url, arrivals)):
        seen.add(times)
    seen.seconds += time.perf_counter() - began
    for index, engine in enumerate(engines):
        seen.engine_seconds[index] += engine.cpu_seconds() - before[index]
    seen.num_pulled_mib += _pulled_mib(engines[1]) - pulled
    seen.num_failed_pulls += _failed_pulls(engines[1]) - failed


def _row(way: Way, seen: Seen) -> str:
    return (
        f"| {way} | {statistics.median(seen.first_token_ms):.0f} | {p99(seen.first_token_ms):.0f} | "
        f"{statistics.median(seen.gap_ms):.1f} | {p99(seen.gap_ms):.1f} | {seen.num_chunks / seen.seconds:.1f} | "
        + "".join(f"{seconds / seen.seconds:.0%} | " for seconds in seen.engine_seconds)
        + f"{seen.num_pulled_mib:.0f} | {seen.num_failed_pulls:.0f} |"
    )


def _pulled_mib(server: Server) -> float:
    return total(server, "kvasir_kv_transfer_bytes_total", "received") / 2**20


def _failed_pulls(server: Server) -> float:
    return total(server, "kvasir_kv_transfer_failures_total")


def total(server: Server, name: str, direction: str | None = None) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and direction in (None, sample.labels.get("direction"))
    )
