"""The engine cores as an API process sees them: what each said of itself and was sent, and which gets the next request.

With data parallelism there are several, each with a copy of the weights and a KV cache of its own. A request goes to
the one that will be done with its prompt first; each API process decides by itself, from what the cores said last and
what it has sent since.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from kvasir_runtime.engine.channel import EngineChannel
from kvasir_runtime.engine.generation import ActiveRequest
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.metrics import TransferStats

CHUNK_TOKENS = 128
"""Prompts that begin alike are told apart in steps of so many tokens."""
MAX_CHUNKS = 1 << 16
"""Remembered; those not used for longest are forgotten first."""
DECODE_TOKENS = 16
"""A sequence in flight takes from a newcomer about as much as so many prompt tokens do."""


@dataclass(slots=True)
class CoreClient:
    channel: EngineChannel
    last_progress: float
    """When it finished a step, or was given work after it had none: seconds of the engine's clock."""
    ready: EngineReady | None = None
    sleep_level: int | None = None
    """None: it is awake."""
    stats: SchedulerStats | None = None
    requests: dict[str, ActiveRequest] = field(default_factory=dict)
    """Of this process, that have not ended."""
    prefill_tokens: int = 0
    """Of those of which no token has come: prompt tokens that are not expected to be cached."""

    @property
    def has_work(self) -> bool:
        """Of this process, that waits for steps and not for other engines alone: more than the core holds for those."""
        stats = self.stats
        if stats is None or stats.num_running or stats.num_waiting:
            return bool(self.requests)
        return len(self.requests) > stats.num_held

    def add(self, request_id: str, request: ActiveRequest) -> None:
        if not self.has_work:
            self.last_progress = request.arrival  # the core had nothing to make progress with
        self.requests[request_id] = request
        self.prefill_tokens += request.prefill_tokens

    def take_begun(self, request: ActiveRequest) -> None:
        """Its prompt is computed, or nobody waits for it any more."""
        self.prefill_tokens -= request.prefill_tokens
        request.prefill_tokens = 0

    def remove(self, request_id: str) -> ActiveRequest | None:
        """None where it has ended already."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.take_begun(request)
        return request

    def give_up(self, error: KvasirRuntimeError) -> None:
        """End the generation of each request."""
        for request in self.requests.values():
            request.generation.fail(error)

    def clear(self) -> None:
        self.requests.clear()
        self.prefill_tokens = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    core: int
    """Its index."""
    prefill_tokens: int
    """Of the prompt, that the core will probably have to compute."""


class PrefixAffinity:
    """Which core was sent a beginning last, and so has it cached unless it ran out of blocks since."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._core_of: OrderedDict[bytes, int] = OrderedDict()

    def match(self, chunks: Sequence[bytes]) -> Mapping[int, int]:
        """Core -> tokens of the longest beginning that it was sent last."""
        found: dict[int, int] = {}
        for index, chunk in enumerate(chunks):
            core = self._core_of.get(chunk)
            if core is None:
                break
            self._core_of.move_to_end(chunk)
            found[core] = (index + 1) * CHUNK_TOKENS
        return found

    def insert(self, chunks: Sequence[bytes], core: int) -> None:
        for chunk in chunks:
            self._core_of[chunk] = core
            self._core_of.move_to_end(chunk)
        while len(self._core_of) > self._max_chunks:
            self._core_of.popitem(last=False)


class Dispatcher:
    def __init__(self, cores: Sequence[CoreClient]) -> None:
        self._cores = cores
        self._affinity = PrefixAffinity()

    def choose(self, token_ids: Sequence[int], cache_salt: str | None) -> Dispatch:
        if len(self._cores) == 1:
            return Dispatch(0, len(token_ids))
        chunks = list(prefix_chunks(token_ids, cache_salt))
        cached = self._affinity.match(chunks)
        uncached = [len(token_ids) - cached.get(index, 0) for index in range(len(self._cores))]
        chosen = min(range(len(self._cores)), key=lambda index: _tokens_ahead(self._cores[index]) + uncached[index])
        self._affinity.insert(chunks, chosen)
        return Dispatch(chosen, uncached[chosen])


def _tokens_ahead(core: CoreClient) -> int:
    """What the core has to do first. It counts what this process sent once it has heard of it, so the larger holds."""
    stats = core.stats
    tokens = 0 if stats is None else stats.waiting_uncached_tokens + stats.running_uncached_tokens
    num_running = 0 if stats is None else stats.num_running
    return max(tokens, core.prefill_tokens) + DECODE_TOKENS * max(num_running, len(core.requests))


def prefix_chunks(token_ids: Sequence[int], cache_salt: str | None) -> Iterator[bytes]:
    """A chained digest of each full chunk; requests of another salt share none."""
    tokens = np.asarray(token_ids, dtype=np.uint32)
    digest = (cache_salt or "").encode()
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS].tobytes()
        digest = blake2b(chunk, digest_size=16, key=blake2b(digest, digest_size=16).digest()).digest()
        yield digest


def total_ready(cores: Sequence[EngineReady]) -> EngineReady:
    """Cores of one configuration differ in their memory only: other limits are those of the first, capacities add
    up."""
    first, shortest = cores[0], min(cores, key=lambda core: core.max_model_len)
    if len(cores) == 1:
        return first
    return msgspec.structs.replace(
        first,
        max_model_len=shortest.max_model_len,
        max_model_len_cut_from=shortest.max_model_len_cut_from,
        num_blocks=sum(core.num_blocks for core in cores),
        kv_capacity_tokens=sum(core.kv_capacity_tokens for core in cores),
        startup_seconds={phase: max(core.startup_seconds[phase] for core in cores) for phase in first.startup_seconds},
    )


def total_stats(cores: Sequence[SchedulerStats]) -> SchedulerStats:
    """Counts and rates add up; the last step is the latest of all."""
    if len(cores) == 1:
        return cores[0]
    rates = [core.prefill_tokens_per_second for core in cores if core.prefill_tokens_per_second is not None]
    special: dict[str, Any] = {
        "last_step_time": max(core.last_step_time for core in cores),
        "num_accepted_per_position": _sums(core.num_accepted_per_position for core in cores),
        "step_tokens_counts": _sums(core.step_tokens_counts for core in cores),
        "prefill_tokens_per_second": sum(rates) if rates else None,
        "transfers": total_transfers([core.transfers for core in cores if core.transfers is not None]),
    }
    sums: dict[str, Any] = {
        name: sum(getattr(core, name) for core in cores)
        for name in SchedulerStats.__struct_fields__
        if name not in special
    }
    return SchedulerStats(**sums, **special)


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """By place; what is shorter counts as zero behind its end."""
    return [sum(of_place) for of_place in itertools.zip_longest(*counts, fillvalue=0)]


def total_transfers(cores: Sequence[TransferStats]) -> TransferStats | None:
    """None: no core exchanges KV, or none has said so yet."""
    if not cores:
        return None
    failures, ended = Counter[str](), Counter[str]()
    for core in cores:
        failures.update(core.num_failures)
        ended.update(core.num_offers_ended)
    return TransferStats(
        num_blocks_sent=sum(core.num_blocks_sent for core in cores),
        num_blocks_received=sum(core.num_blocks_received for core in cores),
        page_bytes=cores[0].page_bytes,
        seconds_counts=_sums(core.seconds_counts for core in cores),
        seconds_sum=sum(core.seconds_sum for core in cores),
        num_failures=dict(failures),
        num_offers_ended=dict(ended),
        num_leased_blocks=sum(core.num_leased_blocks for core in cores),
        num_requests_kept=sum(core.num_requests_kept for core in cores),
    )
