"""Whether an answer is the same whatever else is served: greedy and with fixed seeds, token for token.

    python benchmarks/same_answers.py [--num N] [-- FLAGS OF kvasir-runtime serve]

examples/models/kvasir-python-7m in its own bfloat16 is asked alone and among others, with n-gram drafts and without,
for streams that are cut and continued through their journal, and for long prompts in small chunks. It prints n of n for
each, and ends with 1 where any differ.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from servers import Server, end_on_sigterm

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "models" / "kvasir-python-7m"
VOCAB_SIZE = 4096
TEMPERATURES = (0.0, 1.0)
NUM_TOKENS = 128
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
COMMENT, EVENT = b": kvasir ", b"data: "

Body = dict[str, Any]
Counts = dict[str, tuple[int, int]]
"""By what was asked: equal answers, of so many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, help="requests of each kind; by default 40, 30, 20 and 80")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    options = parser.parse_args()
    end_on_sigterm()
    counts = asyncio.run(measure(options.num, options.flags))
    sys.exit(any(equal < number for equal, number in counts.values()))


async def measure(num: int | None, flags: Sequence[str]) -> Counts:
    counts: Counts = {}

    def compare(what: str, alone: list[list[int]], others: list[list[int]]) -> None:
        counts[what] = sum(own == other for own, other in zip(alone, others, strict=True)), len(alone)
        print(f"{what}: {counts[what][0]} of {counts[what][1]}", flush=True)

    async with AsyncExitStack() as stack:
        plain, drafting, chunking = [
            await stack.enter_async_context(serving([*own, *flags]))
            for own in (
                [],
                ["--speculative-config", json.dumps(NGRAM)],
                ["--max-num-batched-tokens", "24", "--max-num-seqs", "8"],
            )
        ]
        for temperature in TEMPERATURES:
            kind = f"at temperature {temperature:g}"
            requests = [short_request(number, temperature) for number in range(num or 40)]
            alone = await one_by_one(plain.ask, requests)
            compare(f"together as alone {kind}", alone, await all_at_once(plain.ask, requests))
            requests = [repetitive_request(number, temperature) for number in range(num or 30)]
            alone = await one_by_one(plain.ask, requests)
            compare(f"with drafts as without {kind}", alone, await one_by_one(drafting.ask, requests))
            compare(f"with drafts and together {kind}", alone, await all_at_once(drafting.ask, requests))
            requests = [long_request(number, temperature) for number in range(num or 20)]
            alone = await one_by_one(plain.ask, requests)
            compare(f"long prompts in chunks {kind}", alone, await all_at_once(chunking.ask, requests))
        requests = [short_request(number, TEMPERATURES[number % 2]) for number in range(num or 80)]
        alone = await one_by_one(plain.ask, requests)
        compare("cut and continued", alone, await all_at_once(plain.ask_and_cut, requests))
    return counts


def short_request(number: int, temperature: float) -> Body:
    rng = random.Random(number)
    return request_of(random_tokens(rng, rng.randint(5, 120)), number, temperature)


def repetitive_request(number: int, temperature: float) -> Body:
    rng = random.Random(number)
    return request_of(random_tokens(rng, rng.randint(5, 8)) * 6, number, temperature)


def long_request(number: int, temperature: float) -> Body:
    """Of more keys than one thread reads alone."""
    rng = random.Random(number)
    return request_of(random_tokens(rng, rng.randint(450, 900)), number, temperature)


def random_tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(number)]


def request_of(prompt: list[int], seed: int, temperature: float) -> Body:
    return {
        "model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": temperature, "seed": seed,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


async def one_by_one(ask: Callable[[Body], Awaitable[list[int]]], requests: list[Body]) -> list[list[int]]:
    return [await ask(body) for body in requests]


async def all_at_once(ask: Callable[[Body], Awaitable[list[int]]], requests: list[Body]) -> list[list[int]]:
    return list(await asyncio.gather(*map(ask, requests)))


@dataclass(frozen=True)
class Engine:
    session: aiohttp.ClientSession
    url: str

    async def ask(self, body: Body) -> list[int]:
        """The answer's tokens."""
        async with self.session.post(self.url, json=body) as answer:
            answer.raise_for_status()
            return list((await answer.json())["choices"][0]["token_ids"])

    async def ask_and_cut(self, body: Body) -> list[int]:
        """The same by streaming: cut at some event, and continued from the journal of what had come, as the router
        does when an engine is lost."""
        body = body | {"stream": True}
        most_events = random.Random(body["seed"]).randrange(1, NUM_TOKENS - 20)
        journal, first = await self._stream(body, b"", most_events)
        return first + (await self._stream(body, journal))[1]

    async def _stream(self, body: Body, journal: bytes, most_events: int | None = None) -> tuple[bytes, list[int]]:
        """Lines of the journal and tokens."""
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-kvasir-resumable": "1"}
        if journal:
            headers["x-kvasir-journal-at"] = str(len(content))
        lines, tokens, num_events = b"", list[int](), 0
        async with self.session.post(self.url, data=content + journal, headers=headers) as answer:
            answer.raise_for_status()
            while num_events != most_events:
                block = await answer.content.readuntil(b"\n\n")
                if not block:  # the stream has ended
                    break
                for line in block.splitlines(keepends=True):
                    lines += line.removeprefix(COMMENT) if line.startswith(COMMENT) else b""
                    if line.startswith(EVENT) and line != EVENT + b"[DONE]\n":
                        event = json.loads(line.removeprefix(EVENT))
                        tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
                        num_events += 1
        return lines, tokens


@asynccontextmanager
async def serving(flags: Sequence[str]) -> AsyncIterator[Engine]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "kvasir_runtime", "serve", str(MODEL), "--served-model-name", "m", "--port", str(port),
        "--device", "cpu", "--kv-cache-memory-bytes", str(1 << 28), "--no-enable-prefix-caching", *flags,
    ]  # fmt: skip
    server = Server("kvasir", command, port, {"PYTHONPATH": str(ROOT / "runtime")}, ready_path="/ready")
    try:
        server.start(Path(tempfile.gettempdir()) / f"kvasir-same-answers-{port}.log")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            yield Engine(session, f"{server.url}/v1/completions")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
