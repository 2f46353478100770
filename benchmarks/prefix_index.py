"""What the router's precise index costs: matching, expecting, applying events, hashing, and memory.

    python -m benchmarks.prefix_index [--out FILE]

prints a table, medians over many repetitions. Engines hold chains of 16-token blocks that they published as events;
"shared" prompts are held by every endpoint to another depth, so that all of them are told apart in one match.
"""

import argparse
import gc
import os
import platform
import resource
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from kvasir_router.prefix_index.block_keys import prompt_keys
from kvasir_router.prefix_index.kv_events import decode_events
from kvasir_router.prefix_index.precise import BlockBudget, PreciseIndex
from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer, TokenizerCard

BLOCK_SIZE = 16
PROMPT_TOKENS = (8_000, 100_000)
NUM_ENDPOINTS = (8, 64)
MEMORY_BLOCKS = 1_000_000
MODEL = Path(__file__).parents[1] / "examples/models/kvasir-python-700k"
BLOCKS_AN_EVENT = 32
"""Half a chunk of a prefill, or what a step of a busy engine stores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table here")
    out: Path | None = parser.parse_args().out
    table = "\n".join([*header(), *match_rows(), "", *other_rows(), "", *token_rows()])
    print(table)
    if out is not None:
        out.write_text(table + "\n")


def header() -> list[str]:
    return [
        "# The router's precise index",
        "",
        f"`python -m benchmarks.prefix_index`, {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, "
        f"{cpu_name()}, one of {os.cpu_count()} cores at a load average of {os.getloadavg()[0]:.0f}. "
        f"Blocks of {BLOCK_SIZE} tokens.",
        "",
        "| prompt | endpoints | match, all deep | match, no one | match, each to its depth | hash |",
        "|---|---|---|---|---|---|",
    ]


def match_rows() -> list[str]:
    return [row(num_tokens, num_endpoints) for num_tokens in PROMPT_TOKENS for num_endpoints in NUM_ENDPOINTS]


def row(num_tokens: int, num_endpoints: int) -> str:
    shared, staggered, unknown = (tokens_of(num_tokens, first) for first in (1, 2, 3))
    index = PreciseIndex(BlockBudget(10**8))
    for number in range(num_endpoints):
        url = f"http://10.0.0.{number}:8000"
        index.reset(url, is_complete=True)
        store(index, url, shared)
        store(index, url, staggered[: num_tokens * (number + 1) // num_endpoints])
    chains = [{BLOCK_SIZE: prompt_keys(tokens.tobytes(), BLOCK_SIZE, b"")} for tokens in (shared, unknown, staggered)]
    assert len(index.match(chains[0])) == len(index.match(chains[2])) == num_endpoints
    matches = [microseconds(partial(index.match, chain)) for chain in chains]
    hashed = microseconds(lambda: prompt_keys(shared.tobytes(), BLOCK_SIZE, b""))
    cells = (f"{value:,.0f} us" for value in (*matches, hashed))
    return f"| {num_tokens:,} tokens | {num_endpoints} | {' | '.join(cells)} |"


def other_rows() -> list[str]:
    payloads = list(payloads_of(tokens_of(320_000, 1)))
    begin = time.perf_counter()
    batches = [decode_events(payload) for payload in payloads]
    decoded = time.perf_counter()
    index = PreciseIndex(BlockBudget(10**8))
    index.reset("engine", is_complete=True)
    for batch in batches:
        for event in batch.events:
            index.apply("engine", event)
    applied = time.perf_counter()
    num_blocks = len(payloads) * BLOCKS_AN_EVENT
    one, further = memory()
    return [
        "| | |",
        "|---|---|",
        f"| stored, an event of {BLOCKS_AN_EVENT} blocks: decoded | {1e6 * (decoded - begin) / len(payloads):.0f} us |",
        f"| ... and applied | {1e6 * (applied - decoded) / len(payloads):.0f} us |",
        f"| blocks decoded and applied a second | {num_blocks / (applied - begin):,.0f} |",
        f"| memory a block, held by one endpoint | {one:.0f} B |",
        f"| ... by each further endpoint | {further:.0f} B |",
    ]


def token_rows() -> list[str]:
    """A conversation of messages of about 1 kB, by the example model's tokenizer."""
    rows = ["| conversation | tokenised anew | one message more |", "|---|---|---|"]
    for num_messages in (1, 4, 16, 40, 400):
        tokenizer = PromptTokenizer(card(), PieceCache(64 * 2**20))
        text = "".join(message(number) for number in range(num_messages))
        begin = time.perf_counter()
        tokenizer.encode(text, add_special_tokens=False)
        anew = 1e6 * (time.perf_counter() - begin)
        more = microseconds(partial(next, encodings_of(tokenizer, text)), 100)
        rows.append(f"| {len(text) / 1000:,.0f} kB | {anew:,.0f} us | {more:,.0f} us |")
    return rows


def encodings_of(tokenizer: PromptTokenizer, text: str) -> Iterator[bytes]:
    """The text and one message more, another one each time."""
    for number in count(1):
        yield tokenizer.encode(text + message(-number), add_special_tokens=False)


def message(number: int) -> str:
    return f"<|im_start|>user\n{number} " + "def hello(name): return name\n" * 33 + "<|im_end|>\n"


def card() -> TokenizerCard:
    return TokenizerCard((MODEL / "tokenizer.json").read_text(), "digest", (MODEL / "chat_template.jinja").read_text())


def memory() -> tuple[float, float]:
    """Bytes a block of the first holder, and of the second."""
    index = PreciseIndex(BlockBudget(10**8))
    sizes = [resident_bytes()]
    for url in ("one", "two"):
        index.reset(url, is_complete=True)
        for payload in payloads_of(tokens_of(MEMORY_BLOCKS * BLOCK_SIZE, 1)):
            for event in decode_events(payload).events:
                index.apply(url, event)
        gc.collect()
        sizes.append(resident_bytes())
    return (sizes[1] - sizes[0]) / MEMORY_BLOCKS, (sizes[2] - sizes[1]) / MEMORY_BLOCKS


def tokens_of(num_tokens: int, first: int) -> "array[int]":
    return array("I", [first, *range(1, num_tokens)])


def payloads_of(tokens: "array[int]") -> Iterator[bytes]:
    parent: bytes | None = None
    step = BLOCKS_AN_EVENT * BLOCK_SIZE
    for start in range(0, len(tokens) - step + 1, step):
        first = start // BLOCK_SIZE
        digests = [number.to_bytes(16, "big") for number in range(first + 1, first + BLOCKS_AN_EVENT + 1)]
        event = ["BlockStored", digests, parent, tokens[start : start + step].tolist(), BLOCK_SIZE, None, "GPU"]
        parent = digests[-1]
        yield msgspec.msgpack.encode([0.0, [event], None])


def store(index: PreciseIndex, url: str, tokens: "array[int]") -> None:
    """As one event; digests are of the content, as engines' are."""
    keys = prompt_keys(tokens.tobytes(), BLOCK_SIZE, b"")
    digests = [key.to_bytes(8, "big") * 2 for key in keys]
    event = ["BlockStored", digests, None, tokens[: len(keys) * BLOCK_SIZE].tolist(), BLOCK_SIZE, None, "GPU"]
    for decoded in decode_events(msgspec.msgpack.encode([0.0, [event], None])).events:
        index.apply(url, decoded)


def microseconds(work: Callable[[], object], max_runs: int = 100_000) -> float:
    """Median of enough runs to fill about a quarter of a second."""
    seconds: list[float] = []
    end = time.perf_counter() + 0.25
    while (time.perf_counter() < end or len(seconds) < 5) and len(seconds) < max_runs:
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
