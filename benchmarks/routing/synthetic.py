"""Traces of other kinds than the recorded ones, seeded: what a rule is good at should not be one trace's habits.

Blocks are of 64 tokens. A request's arrival is Poisson at a rate that loads eight replicas of the default engine about
as the conversation trace does at its own speed.
"""

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from benchmarks.routing.trace import Trace, TraceRequest

BLOCK_TOKENS = 64
_DURATION_SECONDS = 1800.0
_QUESTIONS_SECONDS = 300.0


@dataclass(slots=True)
class _Conversation:
    """Its prompt grows at the end, turn by turn; the blocks of the past stay the same."""

    blocks: list[int]  # full ones
    num_tokens: int
    ids: Iterator[int] = field(repr=False)

    def grow(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        while len(self.blocks) < self.num_tokens // BLOCK_TOKENS:
            self.blocks.append(next(self.ids))

    def request(self, arrived: float, num_output_tokens: int) -> TraceRequest:
        partial = (next(self.ids),) if self.num_tokens % BLOCK_TOKENS else ()
        return TraceRequest(arrived, self.num_tokens, num_output_tokens, (*self.blocks, *partial))


def agents(seed: int = 0) -> Trace:
    """Twelve agents, each with a system prompt of 4k to 16k tokens, used unevenly; sessions call it 5 to 40 times with
    a tool's answer of some hundred tokens more each time, seconds apart."""
    source, ids = random.Random(f"agents-{seed}"), count()
    systems = [[next(ids) for _ in range(source.randint(64, 256))] for _ in range(12)]
    requests: list[TraceRequest] = []
    for begin in _poisson(source, 0.45):
        system = source.choices(systems, weights=[1 / (rank + 1) for rank in range(len(systems))])[0]
        session = _Conversation(list(system), len(system) * BLOCK_TOKENS, ids)
        at = begin
        for _ in range(source.randint(5, 40)):
            session.grow(_tokens(source, 300, 1.0, 6000))
            num_output_tokens = _tokens(source, 120, 0.8, 1000)
            requests.append(session.request(at, num_output_tokens))
            session.grow(num_output_tokens)
            at += num_output_tokens * 0.015 + source.expovariate(1 / 4)
    return _trace("agents", requests)


def chats(seed: int = 0) -> Trace:
    """Short chats: one system prompt of 1k tokens for all, some hundred tokens a turn, up to eight turns."""
    source, ids = random.Random(f"chats-{seed}"), count()
    system = [next(ids) for _ in range(16)]
    requests: list[TraceRequest] = []
    for begin in _poisson(source, 11.0):
        chat = _Conversation(list(system), len(system) * BLOCK_TOKENS, ids)
        at = begin
        for _ in range(min(1 + int(source.expovariate(0.4)), 8)):
            chat.grow(_tokens(source, 150, 1.0, 4000))
            num_output_tokens = _tokens(source, 180, 0.7, 1500)
            requests.append(chat.request(at, num_output_tokens))
            chat.grow(num_output_tokens)
            at += num_output_tokens * 0.015 + source.expovariate(1 / 25)
    return _trace("chats", requests)


def documents(seed: int = 0) -> Trace:
    """One question on one document each: nothing shared, lengths with a heavy tail up to 120k tokens."""
    source, ids = random.Random(f"documents-{seed}"), count()
    requests: list[TraceRequest] = []
    for at in _poisson(source, 5.0):
        document = _Conversation([], 0, ids)
        document.grow(min(int(1500 * source.paretovariate(1.25)), 120_000))
        requests.append(document.request(at, _tokens(source, 200, 0.8, 2000)))
    return _trace("documents", requests)


def hot_document(seed: int = 0) -> Trace:
    """One document of 60k tokens about which everybody asks: each engine may have it, at 7 s of prefill."""
    return _questions("hot-document", seed, num_documents=1, document_tokens=60_032, per_second=2.0)


def hot_documents(seed: int = 0) -> Trace:
    """The same of eight documents of 30k tokens, asked about unevenly."""
    return _questions("hot-documents", seed, num_documents=8, document_tokens=30_016, per_second=6.0)


def slow_decoder(seed: int = 0) -> Trace:
    """Questions behind one system prompt of 8k tokens, to a fleet whose first engine decodes four times slower."""
    trace = _questions("slow-decoder", seed, num_documents=1, document_tokens=8192, per_second=20.0)
    return replace(trace, decode_slowdowns=(4.0,))


def _questions(name: str, seed: int, *, num_documents: int, document_tokens: int, per_second: float) -> Trace:
    """Some hundred tokens behind a document each, for answers of some hundred."""
    source, ids = random.Random(f"{name}-{seed}"), count()
    documents = [[next(ids) for _ in range(document_tokens // BLOCK_TOKENS)] for _ in range(num_documents)]
    requests: list[TraceRequest] = []
    for at in _poisson(source, per_second, _QUESTIONS_SECONDS):
        document = source.choices(documents, weights=[1 / (rank + 1) for rank in range(num_documents)])[0]
        asked = _Conversation(list(document), document_tokens, ids)
        asked.grow(_tokens(source, 100, 0.5, 1000))
        requests.append(asked.request(at, _tokens(source, 350, 0.6, 2000)))
    return _trace(name, requests)


def azure(path: Path, seed: int = 0) -> Trace:
    """Arrivals and lengths of Azure's 2023 trace, which says nothing of what is shared: nothing is."""
    ids = count()
    requests: list[TraceRequest] = []
    with path.open() as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]
    for moment, num_input_tokens, num_output_tokens in rows:
        prompt = _Conversation([], 0, ids)
        prompt.grow(max(num_input_tokens, 1))
        requests.append(prompt.request((moment - rows[0][0]).total_seconds(), max(num_output_tokens, 1)))
    return _trace("azure", requests)


SYNTHETIC: dict[str, Callable[[int], Trace]] = {
    "agents": agents,
    "chats": chats,
    "documents": documents,
    "hot-document": hot_document,
    "hot-documents": hot_documents,
    "slow-decoder": slow_decoder,
}


def _poisson(source: random.Random, per_second: float, until: float = _DURATION_SECONDS) -> Iterator[float]:
    at = source.expovariate(per_second)
    while at < until:
        yield at
        at += source.expovariate(per_second)


def _tokens(source: random.Random, median: float, sigma: float, most: int) -> int:
    """Log-normal."""
    return max(min(int(median * source.lognormvariate(0, sigma)), most), 1)


def _trace(name: str, requests: list[TraceRequest]) -> Trace:
    return Trace(name, BLOCK_TOKENS, tuple(sorted(requests, key=lambda request: request.arrived)))
