"""Requests over time: recorded traces, and ramps, steps, bursts and days, with nights or without, of Poisson arrivals
with lengths as Azure's; and long prompts with short answers that come ten times as often now and then: at irregular
times (`gusts`), or after the same silence each time (`pulses`), both drawn by the seed.

Open loop: what arrives does not depend on what is answered. Seeded.
"""

import math
import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.routing.synthetic import azure
from benchmarks.routing.trace import Trace, TraceRequest, load_mooncake

BLOCK_TOKENS = 64
DURATION_SECONDS = 3600.0
Shape = Callable[[float], float]
"""Requests per second at a moment."""


@dataclass(frozen=True)
class Lengths:
    """Medians, of log-normal lengths in tokens."""

    prompt: int = 800
    answer: int = 150
    sigma: float = 0.8


def _gusts(source: random.Random) -> Shape:
    edges, at = [0.0], 0.0
    while at < DURATION_SECONDS:
        edges += [at := at + source.uniform(120, 480), at := at + source.uniform(45, 180)]
    busy = source.uniform(2.5, 6.0)
    return lambda at: busy if bisect(edges, at) % 2 == 0 else busy / 10


def _pulses(source: random.Random) -> Shape:
    quiet, long, busy = source.choice((180, 300, 480, 780)), source.choice((60, 120, 180)), source.uniform(2.5, 6.0)
    return lambda at: busy if at % (quiet + long) >= quiet else 0.0


DRAWN = {"gusts": _gusts, "pulses": _pulses}
LONG_PROMPTS = Lengths(2000, 30, 0.4)

SHAPES: dict[str, Shape] = {
    "ramp": lambda at: 1.5 + 7.0 * (1 - abs(at / (DURATION_SECONDS / 2) - 1)),
    "step": lambda at: 7.0 if 900 <= at < 2400 else 2.0,
    "bursts": lambda at: 8.0 if at % 900 < 150 else 2.5,
    "nights": lambda at: max(0.0, -8.0 * math.sin(2 * math.pi * at / (DURATION_SECONDS / 2))),
    "diurnal": lambda at: 4.5 - 3.0 * math.cos(2 * math.pi * at / (DURATION_SECONDS / 2)),
}


def load(name: str, traces: Path, seed: int = 0) -> Trace:
    """`traces`: the folder of the recorded ones, azure and mooncake."""
    if name == "azure":
        return azure(traces / "azure_2023_conv.csv")
    if name == "mooncake":
        return load_mooncake(traces / "mooncake_conversation_trace.jsonl", seed)
    if name in DRAWN:
        return shaped(name, DRAWN[name](random.Random(f"{name}-{seed}")), seed, lengths=LONG_PROMPTS)
    return shaped(name, SHAPES[name], seed)


def shaped(
    name: str,
    per_second: Shape,
    seed: int = 0,
    duration_seconds: float = DURATION_SECONDS,
    lengths: Lengths = Lengths(),
) -> Trace:
    """By thinning; prompts share nothing."""
    source, ids = random.Random(f"{name}-{seed}"), count()
    most = max(per_second(float(at)) for at in range(int(duration_seconds)))
    requests: list[TraceRequest] = []
    at = source.expovariate(most)
    while at < duration_seconds:
        if source.random() * most < per_second(at):
            num_input = _tokens(source, lengths.prompt, lengths.sigma, 6000)
            num_output = _tokens(source, lengths.answer, lengths.sigma, 1000)
            blocks = tuple(next(ids) for _ in range(-(-num_input // BLOCK_TOKENS)))
            requests.append(TraceRequest(at, num_input, num_output, blocks))
        at += source.expovariate(most)
    return Trace(name, BLOCK_TOKENS, tuple(requests))


def _tokens(source: random.Random, median: float, sigma: float, most: int) -> int:
    """Log-normal."""
    return max(min(int(median * source.lognormvariate(0, sigma)), most), 1)
