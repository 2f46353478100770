"""One engine in virtual time, between whose events everything proceeds at constant rates.

Prompts are prefilled one after another in chunks; the decodes of the others take a part of every step, and get a token
from each. A request starts once its prompt and output fit into the KV cache, so none is preempted; blocks that no
request uses stay cached until their place is needed, the least recently used first, and ends before beginnings.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp2, inf

from benchmarks.routing.job import Job

_EPSILON = 1e-9
_RATE_HALF_LIFE_SECONDS = 5.0  # as the runtime's


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Defaults: about a model of 8 billion parameters in FP8, KV too, on one H100 of 80 GB."""

    prefill_tokens_per_second: float = 16_000.0  # at the begin of a prompt
    context_doubling_tokens: float = 32768.0  # behind so many tokens, attention makes a token cost twice as much
    kv_capacity_tokens: int = 900_000
    chunk_tokens: int = 2048
    decode_step_seconds: float = 0.008
    decode_seconds_per_kv_token: float = 2.5e-8
    fetch_tokens_per_second: float = 50_000.0  # KV from a peer: 64 KiB a token at 3.3 GB/s
    fetch_overhead_seconds: float = 0.005

    def decoding_slower(self, times: float) -> "EngineModel":
        return replace(
            self,
            decode_step_seconds=times * self.decode_step_seconds,
            decode_seconds_per_kv_token=times * self.decode_seconds_per_kv_token,
        )

    def prefill_seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        context = num_cached_tokens + num_tokens / 2
        return num_tokens / self.prefill_tokens_per_second * (1 + context / self.context_doubling_tokens)

    def fetch_seconds(self, num_tokens: int) -> float:
        return self.fetch_overhead_seconds + num_tokens / self.fetch_tokens_per_second


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    at: float
    engine: int
    stored: tuple[int, ...]
    removed: tuple[int, ...]


class Engine:
    """`updates` is the log of all engines' caches; `on_first_token` and `on_finish` are told at the moment itself."""

    def __init__(self, number: int, model: EngineModel, block_tokens: int, updates: list[CacheUpdate]) -> None:
        self.number = number
        self.model = model
        self.event_at = inf  # for whoever keeps the calendar
        self.work_seconds = 0.0  # of prefill, without what decodes took of it
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.waiting: deque[Job] = deque()
        self.waiting_uncached_tokens = 0
        self.prefilling: Job | None = None
        self.arrived: list[str] = []  # since the last report
        self.first_tokens: list[Job] = []  # since the calendar looked last
        self.finished: list[Job] = []
        self._updates = updates
        self._block_tokens = block_tokens
        self._capacity_blocks = model.kv_capacity_tokens // block_tokens
        self._chunk_seconds = model.chunk_tokens / model.prefill_tokens_per_second
        self._now = 0.0
        self._prefill_left = 0.0  # seconds, if it had the engine for itself
        self._prefill_begun = 0.0
        self._prefill_speed = 1.0
        self._steps = 0.0
        self._steps_per_second = 0.0
        self._decodes: list[tuple[float, int, Job]] = []  # by the step of the last token
        self._decode_kv_tokens = 0.0
        self._in_use: dict[int, int] = {}  # block -> number of requests
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached, least recent first
        self._output_blocks = 0
        self._recent_tokens = self._recent_seconds = 0.0
        self._recent_steps = self._recent_step_seconds = 0.0

    @property
    def num_running(self) -> int:
        return len(self._decodes) + (self.prefilling is not None)

    @property
    def num_in_flight(self) -> int:
        return self.num_running + len(self.waiting)

    @property
    def kv_used_tokens(self) -> int:
        return min(len(self._in_use) + self._output_blocks // 2, self._capacity_blocks) * self._block_tokens

    @property
    def kv_usage(self) -> float:
        return self.kv_used_tokens / self.model.kv_capacity_tokens

    @property
    def steps_per_second(self) -> float:
        return self._steps_per_second

    @property
    def recent_steps_per_second(self) -> float:
        """As engines report it: over the last seconds in which it worked, prefills included."""
        return self._recent_steps / self._recent_step_seconds if self._recent_step_seconds else 0.0

    @property
    def chunk_seconds(self) -> float:
        """Of a prefill, what decodes take of it included."""
        return self._chunk_seconds / self._prefill_speed

    @property
    def prefill_tokens_per_second(self) -> float | None:
        return self._recent_tokens / self._recent_seconds if self._recent_seconds else None

    def running_uncached_tokens(self, now: float) -> int:
        self._advance(now)
        job = self.prefilling
        if job is None:
            return 0
        share = self._prefill_left / max(
            self.model.prefill_seconds(job.num_uncached_tokens, job.num_cached_tokens), 1e-9
        )
        return int(share * job.num_uncached_tokens)

    def queue_seconds(self, now: float) -> float:
        """Prefill ahead of a newcomer, as it really is."""
        self._advance(now)
        left = self._prefill_left if self.prefilling is not None else 0.0
        for job in self.waiting:
            left += self.model.prefill_seconds(job.num_input_tokens - job.num_expected_cached, job.num_expected_cached)
        return left / self._prefill_speed

    def submit(self, job: Job, now: float) -> None:
        self._advance(now)
        job.num_expected_cached = self.cached_tokens(job)
        self.arrived.append(job.request_id)
        self.waiting.append(job)
        self.waiting_uncached_tokens += job.num_input_tokens - job.num_expected_cached
        self._start_next()

    def cached_tokens(self, job: Job) -> int:
        in_use, unused = self._in_use, self._unused
        depth = 0
        for block in job.blocks:
            if block not in in_use and block not in unused:
                break
            depth += 1
        return job.tokens_of(depth, self._block_tokens)

    def to_fetch(self, job: Job, peer: "Engine") -> tuple[tuple[int, ...], float]:
        """The prompt's leading blocks that the peer has, and seconds until they are here; none where computing what it
        lacks of them is no slower.
        """
        num_there, num_cached = peer.cached_tokens(job), self.cached_tokens(job)
        seconds = self.model.fetch_seconds(num_there - num_cached)
        if seconds >= self.model.prefill_seconds(num_there - num_cached, num_cached):
            return (), 0.0
        return job.blocks[: num_there // self._block_tokens], seconds

    def land(self, blocks: tuple[int, ...], now: float) -> None:
        """They have come from a peer, and are cached."""
        self._advance(now)
        new = tuple(block for block in blocks if block not in self._in_use and block not in self._unused)
        self._unused.update(dict.fromkeys(reversed(new)))
        self._updates.append(CacheUpdate(now, self.number, new, ()))
        self._evict()

    def next_event(self) -> float:
        """When a prefill or a decode will end if nothing else arrives."""
        at = inf
        if self.prefilling is not None:
            at = self._now + max(self._prefill_left, 0.0) / self._prefill_speed
        if self._decodes:
            at = min(at, self._now + max(self._decodes[0][0] - self._steps, 0.0) / self._steps_per_second)
        return at

    def proceed(self, now: float) -> None:
        """To an event's moment; what has ended is then in `first_tokens` and `finished`."""
        self._advance(now)
        if self.prefilling is not None and self._prefill_left <= _EPSILON:
            self._end_prefill(self.prefilling)
        while self._decodes and self._decodes[0][0] <= self._steps + _EPSILON * max(self._steps, 1):
            self._end(heappop(self._decodes)[2])
        self._start_next()

    def _advance(self, now: float) -> None:
        elapsed = now - self._now
        if elapsed <= 0:
            return
        self._now = now
        self._steps += elapsed * self._steps_per_second
        if self._steps_per_second:
            kept = exp2(-elapsed / _RATE_HALF_LIFE_SECONDS)
            self._recent_steps = kept * self._recent_steps + elapsed * self._steps_per_second
            self._recent_step_seconds = kept * self._recent_step_seconds + elapsed
        if self.prefilling is not None:
            self._prefill_left -= elapsed * self._prefill_speed

    def _start_next(self) -> None:
        if self.prefilling is None and self.waiting and self._allocate(self.waiting[0]):
            job = self.waiting.popleft()
            self.waiting_uncached_tokens -= job.num_input_tokens - job.num_expected_cached
            self._begin_prefill(job)
        self._set_speeds()

    def _begin_prefill(self, job: Job) -> None:
        self.prefilling = job
        self._prefill_begun = self._now
        self._prefill_left = self.model.prefill_seconds(job.num_uncached_tokens, job.num_cached_tokens)
        self.work_seconds += self._prefill_left
        self.num_prompt_tokens += job.num_input_tokens
        self.num_cached_tokens += job.num_cached_tokens

    def _end_prefill(self, job: Job) -> None:
        self.prefilling = None
        job.first_token_at = self._now
        self._recent_tokens = 0.9 * self._recent_tokens + job.num_uncached_tokens
        self._recent_seconds = 0.9 * self._recent_seconds + self._now - self._prefill_begun
        self._updates.append(CacheUpdate(self._now, self.number, job.blocks[job.num_cached_blocks :], ()))
        self.first_tokens.append(job)
        self._decode_kv_tokens += job.num_kv_tokens
        heappush(self._decodes, (self._steps + job.num_output_tokens - 1, job.number, job))

    def _end(self, job: Job) -> None:
        self._decode_kv_tokens -= job.num_kv_tokens
        self._output_blocks -= job.num_output_blocks(self._block_tokens)
        in_use, unused = self._in_use, self._unused
        for block in reversed(job.blocks):
            num_users = in_use[block] - 1
            if num_users:
                in_use[block] = num_users
            else:
                del in_use[block]
                unused[block] = None
        self.finished.append(job)

    def _allocate(self, job: Job) -> bool:
        in_use, unused = self._in_use, self._unused
        num_new = sum(block not in in_use for block in job.blocks)
        num_output_blocks = job.num_output_blocks(self._block_tokens)
        if len(in_use) + self._output_blocks + num_new + num_output_blocks > self._capacity_blocks and in_use:
            return False
        job.num_cached_blocks = next(
            (i for i, block in enumerate(job.blocks) if block not in in_use and block not in unused), len(job.blocks)
        )
        job.num_cached_tokens = job.tokens_of(job.num_cached_blocks, self._block_tokens)
        for block in job.blocks:
            in_use[block] = in_use.get(block, 0) + 1
            if block in unused:
                del unused[block]
        self._output_blocks += num_output_blocks
        self._evict()
        return True

    def _evict(self) -> None:
        num_excess = len(self._in_use) + len(self._unused) + self._output_blocks - self._capacity_blocks
        if num_excess > 0:
            removed = tuple(self._unused.popitem(last=False)[0] for _ in range(min(num_excess, len(self._unused))))
            self._updates.append(CacheUpdate(self._now, self.number, (), removed))

    def _set_speeds(self) -> None:
        reading = self._decode_kv_tokens * self.model.decode_seconds_per_kv_token
        if self.prefilling is not None:
            step_seconds = self._chunk_seconds + reading
            self._prefill_speed = self._chunk_seconds / step_seconds
        else:
            step_seconds = self.model.decode_step_seconds + reading
        self._steps_per_second = 1 / step_seconds if self._decodes or self.prefilling is not None else 0.0
