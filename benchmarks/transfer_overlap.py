"""How much of a prompt's transfer lies beside its prefill, with engines that compute it (a part of disaggregation.py).

An engine that prefills and one that decodes, a core each, behind the real router. Blocks go as soon as a chunk is
written; nothing can lie beside where the whole prompt is one chunk, or where the decode engine hears of it only once
the prefill has ended, as vLLM's routers do it. One prompt at a time, none with a beginning that was seen before, and
all into pages that were used before: those of a new engine may not be in memory yet. The engines write down when blocks
were written and read (timed_engine.py).
"""

import asyncio
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mixed_and_split import HOST, MAX_MODEL_LEN, new_engine, new_router, total, transfer_flags
from servers import OtherWork, Server
from timed_engine import FILE
from workloads import new_session, prompt, stream

from kvasir_operator.local.network import free_port

CHUNK_TOKENS = 512
WAYS = ((CHUNK_TOKENS, "kvasir"), (CHUNK_TOKENS, "vllm"), (MAX_MODEL_LEN, "kvasir"))
"""Of the prefill's chunks, and of telling the decode engine: at once, or after the prefill."""
KV_CACHE_MIB = 128
NUM_WARM_UPS = 4
"""Of the longest prompts: these fill the cache of engines of 12 KiB a token."""
NUM_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class Event:
    event: str
    blocks: int
    at: float


@dataclass(frozen=True)
class Transfer:
    """Of one prompt; seconds."""

    first_token: float
    prefill: float
    """From the client's sending to the last block's writing."""
    reading: float
    """All reads."""
    beside: float
    """Of them before the prefill's end."""
    behind: float
    """From the prefill's end until the decode engine has compared the last checksum."""
    num_reads: int


def transfer_of(sent: float, first_token: float, prefill: Sequence[Event], decode: Sequence[Event]) -> Transfer:
    """Of the times and events of one prompt in client and engines, which have one clock."""
    written = max(event.at for event in prefill if event.event == "written" and event.blocks)
    ended = max(event.at for event in decode if event.event == "ended")
    begins, ends = ([event.at for event in decode if event.event == name] for name in ("reading", "read"))
    reads = list(zip(begins, ends, strict=True))
    return Transfer(
        first_token=first_token - sent,
        prefill=written - sent,
        reading=sum(end - begin for begin, end in reads),
        beside=sum(max(min(end, written) - begin, 0.0) for begin, end in reads),
        behind=ended - written,
        num_reads=len(reads),
    )


@dataclass(frozen=True)
class Pair:
    """The log of a prefill engine, of the decode engine, and the router before both."""

    router: Server
    prefill: Server
    decode: Server

    def events(self) -> tuple[list[Event], list[Event]]:
        """Since the last question."""
        found = []
        for engine in (self.prefill, self.decode):
            log = Path(engine.environment[FILE])
            found.append([Event(**json.loads(line)) for line in log.read_text().splitlines()])
            log.write_text("")
        return found[0], found[1]


@contextmanager
def running(model: Path, chunk_tokens: int, protocol: str, work: Path) -> Iterator[Pair]:
    port, engines = free_port(HOST), []
    for index, core in enumerate(sorted(os.sched_getaffinity(0))[:2]):
        flags = [
            *transfer_flags("split always", index, port), "--max-num-batched-tokens", str(chunk_tokens),
            "--kv-cache-memory-bytes", str(KV_CACHE_MIB << 20),
        ]  # fmt: skip
        engine = new_engine(model, core, flags, [str(Path(__file__).parent / "timed_engine.py")])
        log = work / f"transfers-{index}.jsonl"
        log.write_text("")
        engine.environment[FILE] = str(log)
        engines.append(engine)
    router = new_router("split always", [engine.url for engine in engines], port, protocol)
    with ExitStack() as stack:
        for server in (*engines, router):
            stack.callback(server.stop)
            server.start(work / f"overlap-{server.name}.log")
        yield Pair(router, *engines)


async def warm_up(pair: Pair, num_tokens: int) -> None:
    """The first may come before the router knows of both engines."""
    async with new_session() as client:
        for number in range(NUM_WARM_UPS):
            await stream(client, pair.router.url, prompt(f"warm-up {number}", num_tokens), NUM_OUTPUT_TOKENS)
    pair.events()


async def transfers(pair: Pair, num_tokens: int, num_prompts: int) -> list[Transfer]:
    seen = []
    async with new_session() as client:
        for number in range(num_prompts):
            tokens = prompt(f"overlap {num_tokens} {number}", num_tokens)
            times = await stream(client, pair.router.url, tokens, NUM_OUTPUT_TOKENS)
            seen.append(transfer_of(times[0], times[1], *pair.events()))
    return seen


def transfer_overlap(model: Path, lengths: Sequence[int], num_prompts: int, work: Path) -> str:
    """A table, a row for each length of prompts and way to compute them; medians."""
    other_work, rows = OtherWork(), []
    for chunk_tokens, protocol in WAYS:
        with running(model, chunk_tokens, protocol, work) as pair:
            asyncio.run(warm_up(pair, max(lengths)))
            for num_tokens in lengths:
                pulled = total(pair.decode, "kvasir_kv_transfer_bytes_total", "received")
                with other_work.than(pair.router, pair.prefill, pair.decode):
                    seen = asyncio.run(transfers(pair, num_tokens, num_prompts))
                pulled = total(pair.decode, "kvasir_kv_transfer_bytes_total", "received") - pulled
                told = "at once" if protocol == "kvasir" else "after it"
                way = f"{num_tokens} | {min(chunk_tokens, num_tokens)} | {told}"
                rows.append(_row(way, pulled / num_prompts, seen))
                print(rows[-1], flush=True)
    return "\n".join([
        f"## Transfers beside the prefill of {model.name}, a core each for prefill and decode, {num_prompts} prompts "
        "each, one at a time (medians)",
        "",
        f"Chunks of {CHUNK_TOKENS} tokens, or the whole prompt as one. The decode engine is told of the prefill at "
        f"once, or after it as by vLLM's routers. Other work kept {other_work} busy.",
        "",
        "| prompt, tokens | chunk | decode told | pulled, MiB | prefill, ms | reads | reading, ms "
        "| of it beside the prefill, ms | hidden | last block after the prefill, ms | TTFT p50, ms |",
        "|---" * 11 + "|",
        *rows,
    ])  # fmt: skip


def _row(way: str, num_bytes: float, seen: Sequence[Transfer]) -> str:
    def milliseconds(name: str) -> float:
        return 1000 * statistics.median(getattr(transfer, name) for transfer in seen)

    return (
        f"| {way} | {num_bytes / 2**20:.1f} | {milliseconds('prefill'):.0f} "
        f"| {statistics.median(transfer.num_reads for transfer in seen):.0f} | {milliseconds('reading'):.1f} "
        f"| {milliseconds('beside'):.1f} "
        f"| {statistics.median(transfer.beside / transfer.reading for transfer in seen):.0%} "
        f"| {milliseconds('behind'):.1f} | {milliseconds('first_token'):.0f} |"
    )
