"""The workloads: what is sent to an engine's /v1/completions, and the figures that come of it.

Prompts are random token ids, seeded by workload and round, so every engine gets the same ones and no round finds
another's prefixes in a cache. Output lengths are forced.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp

FIRST_ID, LAST_ID = 300, 31_000
LIMIT_SECONDS = 900
SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
"""As Qwen3's generation_config.json has it."""
SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "penalised": SAMPLED | {"presence_penalty": 1.5},
}


@dataclass(frozen=True)
class Figure:
    """One cell of the table."""

    value: float
    unit: str
    higher_is_better: bool


Figures = dict[str, Figure]
Workload = Callable[[str, int], Coroutine[Any, Any, Figures]]
"""(base URL, round) -> figures by row name."""


def prompt(seed: str, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(num_tokens)]


async def offline(url: str, round_number: int, sampling: str = "greedy") -> Figures:
    """64 requests of 256 in / 128 out, all at once."""
    prompts = [prompt(f"offline-{sampling}-{round_number}-{index}", 256) for index in range(64)]
    rate = 64 * 128 / await _seconds_to_complete(url, prompts, 128, sampling)
    return {f"64 x 256 in / 128 out{_told(sampling)}, output tok/s": Figure(rate, "tok/s", True)}


async def single_stream(url: str, round_number: int, sampling: str = "greedy") -> Figures:
    """One stream of 32 in / 128 out, three times over; medians."""
    rates, firsts = [], []
    async with new_session() as session:
        for index in range(3):
            times = await stream(session, url, prompt(f"single-{sampling}-{round_number}-{index}", 32), 128, sampling)
            rates.append(127 / (times[-1] - times[1]))
            firsts.append((times[1] - times[0]) * 1000)
    name = f"1 x 32 in / 128 out{_told(sampling)}"
    return {
        f"{name}, decode tok/s": Figure(statistics.median(rates), "tok/s", True),
        f"{name}, first token ms": Figure(statistics.median(firsts), "ms", False),
    }


async def sampled(url: str, round_number: int) -> Figures:
    """One stream, and 64 at once, as clients sample who set nothing, and with a presence penalty."""
    figures: Figures = {}
    for sampling in ("sampled", "penalised"):
        figures |= await single_stream(url, round_number, sampling)
        figures |= await offline(url, round_number, sampling)
    return figures


async def prefill(url: str, round_number: int) -> Figures:
    """8 requests of 1,024 in / 1 out, all at once."""
    prompts = [prompt(f"prefill-{round_number}-{index}", 1024) for index in range(8)]
    rate = 8 * 1024 / await _seconds_to_complete(url, prompts, 1)
    return {"8 x 1024 in / 1 out, prompt tok/s": Figure(rate, "tok/s", True)}


async def shared_prefix(url: str, round_number: int) -> Figures:
    """32 requests of 1,024 shared + 32 own tokens in / 32 out, all at once: the prefix unseen, cached, and then the
    same 32 prompts again."""
    shared, figures = prompt(f"shared-{round_number}", 1024), {}
    for name, tails in (("", ""), (", prefix cached", ", cached"), (", same prompts again", ", cached")):
        prompts = [shared + prompt(f"shared-{round_number}{tails}-{index}", 32) for index in range(32)]
        seconds = await _seconds_to_complete(url, prompts, 32)
        figures[f"32 x (1024 shared + 32) in / 32 out{name}, s"] = Figure(seconds, "s", False)
    return figures


def online(num_input: int, num_output: int, rate: float = 4.0, duration_seconds: float = 30.0) -> Workload:
    """Poisson arrivals, streamed."""

    async def run(url: str, round_number: int) -> Figures:
        rng = random.Random(f"arrivals-{round_number}")
        tasks: list[asyncio.Task[list[float]]] = []
        async with new_session() as session:
            end = time.perf_counter() + duration_seconds
            while time.perf_counter() < end:
                tokens = prompt(f"online-{round_number}-{len(tasks)}", num_input)
                tasks.append(asyncio.create_task(stream(session, url, tokens, num_output)))
                await asyncio.sleep(rng.expovariate(rate))
            streams = await asyncio.gather(*tasks)
        firsts = [(times[1] - times[0]) * 1000 for times in streams]
        gaps = [(b - a) * 1000 for times in streams for a, b in itertools.pairwise(times[1:])]
        totals = [(times[-1] - times[0]) * 1000 for times in streams]
        name = f"online {rate:g} req/s, {num_input} in / {num_output} out"
        return {
            f"{name}, first token p50 ms": Figure(statistics.median(firsts), "ms", False),
            f"{name}, first token p99 ms": Figure(p99(firsts), "ms", False),
            f"{name}, inter-token p50 ms": Figure(statistics.median(gaps), "ms", False),
            f"{name}, inter-token p99 ms": Figure(p99(gaps), "ms", False),
            f"{name}, whole request p50 ms": Figure(statistics.median(totals), "ms", False),
        }

    return run


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=LIMIT_SECONDS)
    )


def _told(sampling: str) -> str:
    return "" if sampling == "greedy" else f", {sampling}"


def _body(tokens: list[int], num_output: int, sampling: str, *, stream: bool) -> dict[str, Any]:
    length = {"max_tokens": num_output, "ignore_eos": True}
    return {"model": "m", "prompt": tokens, "stream": stream} | length | SAMPLINGS[sampling]


async def _seconds_to_complete(url: str, prompts: list[list[int]], num_output: int, sampling: str = "greedy") -> float:
    begin = time.perf_counter()
    async with new_session() as session:
        await asyncio.gather(*(_complete(session, url, tokens, num_output, sampling) for tokens in prompts))
    return time.perf_counter() - begin


async def _complete(
    session: aiohttp.ClientSession, url: str, tokens: list[int], num_output: int, sampling: str
) -> None:
    body = _body(tokens, num_output, sampling, stream=False)
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        count = (await answer.json())["usage"]["completion_tokens"]
    if count != num_output:
        raise RuntimeError(f"{url} gave {count} tokens, asked for {num_output}")


async def stream(
    session: aiohttp.ClientSession, url: str, tokens: list[int], num_output: int, sampling: str = "greedy"
) -> list[float]:
    """Time of sending, then of each chunk with text."""
    times, body = [time.perf_counter()], _body(tokens, num_output, sampling, stream=True)
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: ") and b'"text"' in line:
                times.append(time.perf_counter())
    if len(times) < 3:
        raise RuntimeError(f"{url} streamed {len(times) - 1} chunks, expected up to {num_output}")
    return times
