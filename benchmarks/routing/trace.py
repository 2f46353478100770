"""Request traces: when requests arrive, how long they are, and which blocks of their prompts are the same.

Mooncake's format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the ids
of the prompt's blocks of 512 tokens; equal ids are equal prefixes.
"""

import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrived: float  # seconds from the trace's begin
    num_input_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]  # the last one may be partly filled


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  # in order of arrival
    decode_slowdowns: tuple[float, ...] = ()  # by which the first engines of a fleet decode slower than the others

    def hit_ceiling(self) -> float:
        """Share of prompt tokens that one endless cache would hold."""
        seen: set[int] = set()
        num_hit = num_tokens = 0
        for request in self.requests:
            depth = next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
            num_hit += min(depth * self.block_tokens, request.num_input_tokens)
            num_tokens += request.num_input_tokens
            seen.update(request.blocks)
        return num_hit / num_tokens


def load_mooncake(path: Path, seed: int = 0) -> Trace:
    """Requests that share a tick of the trace's clock are spread evenly over it, each at random within its part."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows.sort(key=lambda row: row["timestamp"])
    arrivals = spread_over_ticks([row["timestamp"] / 1000 for row in rows], random.Random(seed))
    requests = (
        TraceRequest(arrived, row["input_length"], max(row["output_length"], 1), tuple(row["hash_ids"]))
        for arrived, row in zip(arrivals, rows, strict=True)
    )
    return Trace(path.stem, MOONCAKE_BLOCK_TOKENS, tuple(requests))


def spread_over_ticks(timestamps: list[float], source: random.Random) -> list[float]:
    """`timestamps` ascend. The clock's tick is the shortest time between two of them that differ."""
    ticks = sorted(set(timestamps))
    tick = min((later - earlier for earlier, later in pairwise(ticks)), default=0.0)
    sizes = dict.fromkeys(ticks, 0)
    for timestamp in timestamps:
        sizes[timestamp] += 1
    return [begin + tick * (i + source.random()) / size for begin, size in sizes.items() for i in range(size)]
