"""Requests over time: recorded traces, and ramps, steps, bursts and days, with nights or without, of Poisson arrivals
with lengths as Azure's.

Open loop: what arrives does not depend on what is answered. Seeded.
"""

import math
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks.routing.synthetic import azure
from benchmarks.routing.trace import Trace, TraceRequest, load_mooncake

BLOCK_TOKENS = 64
DURATION_SECONDS = 3600.0
Shape = Callable[[float], float]
"""Requests per second at a moment."""

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
    return shaped(name, SHAPES[name], seed)


def shaped(name: str, per_second: Shape, seed: int = 0, duration_seconds: float = DURATION_SECONDS) -> Trace:
    """By thinning; prompts share nothing."""
    source, ids = random.Random(f"{name}-{seed}"), count()
    most = max(per_second(float(at)) for at in range(int(duration_seconds)))
    requests: list[TraceRequest] = []
    at = source.expovariate(most)
    while at < duration_seconds:
        if source.random() * most < per_second(at):
            num_input, num_output = _tokens(source, 800, 0.8, 6000), _tokens(source, 150, 0.8, 1000)
            blocks = tuple(next(ids) for _ in range(-(-num_input // BLOCK_TOKENS)))
            requests.append(TraceRequest(at, num_input, num_output, blocks))
        at += source.expovariate(most)
    return Trace(name, BLOCK_TOKENS, tuple(requests))


def _tokens(source: random.Random, median: float, sigma: float, most: int) -> int:
    """Log-normal."""
    return max(min(int(median * source.lognormvariate(0, sigma)), most), 1)
