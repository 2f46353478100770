"""A scheduler with a rank that is pure arithmetic, stepped by hand."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from tests.runtime.scheduling.fake_rank import FakeRank

from kvasir_runtime.kv_cache.events import KvEventLog
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import Outcome, SequenceOutput
from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.scheduling.step import SchedulerLimits, StepBudget, StepPlan, StepResult
from kvasir_runtime.scheduling.waiting import PolicyName, WaitingQueue, waiting_queue

settings.register_profile("long", max_examples=3000, stateful_step_count=60, deadline=None)
settings.register_profile("same", max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)
settings.load_profile("same")

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
FULL = (KvGroup((0,)),)


def least_blocks(groups: tuple[KvGroup, ...], block_size: int, max_model_len: int, budget: int) -> int:
    """Without which an engine does not start (`kv_buffer.blocks_of_sequence`, which brings torch along)."""
    empty = KvCache(0, block_size, groups, enable_prefix_caching=False)
    return empty.num_pages_to_admit(empty.no_prefix(), max_model_len, budget)


class FixedDepth:
    """Always so many drafts."""

    def __init__(self, depth: int) -> None:
        self.max_depth = depth
        self.num_asked = 0
        self.observed: list[tuple[int, int]] = []

    def depths(self, rows):
        self.num_asked += 1
        return rows * 0 + self.max_depth

    def observe(self, rows, num_drafts, num_accepted) -> None:
        self.observed += zip(num_drafts.tolist(), num_accepted.tolist(), strict=True)

    def forget(self, row: int) -> None: ...


@dataclass
class Engine:
    """Scheduler and rank; `ahead` steps are planned beyond the one whose results are taken."""

    scheduler: Scheduler
    kv: KvCache
    rank: FakeRank
    ahead: int
    event_log: KvEventLog
    under_way: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_added: int = 0
    arrive_together: bool = False
    now: float | None = None
    """By the clock that the scheduler is told."""

    def add(self, prompt: list[int], *, request_id: str | None = None, max_tokens: int = 8, tenant: str = "",
            priority: int = 0, n: int = 1, beam: BeamSearch | None = None, so_far: dict[int, list[int]] | None = None,
            is_held: bool = False, salt: str | None = None, arrival: float | None = None, **sampling: object,
            ) -> str:  # fmt: skip
        self.num_added += 1
        request_id = request_id or f"request-{self.num_added}"
        arrival_time = 0.0 if self.arrive_together else float(self.num_added) if arrival is None else arrival
        starts = [
            SequenceStart(index=index, seed=index, output_token_ids=(so_far or {}).get(index, [])) for index in range(n)
        ]
        message = AddRequest(
            request_id=request_id, api_index=0, arrival_time=arrival_time, sequences=starts,
            spec=RequestSpec(
                prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
                tenant=tenant, priority=priority, beam=beam, cache_salt=salt,
            ),
        )  # fmt: skip
        self.scheduler.add(message, is_held=is_held)
        return request_id

    def pull(self, prompt: list[int], num_good: int, **kwargs: object) -> str:
        """A request for which so many blocks have come from another engine, and then something else."""
        request_id, remote = self.add(prompt, is_held=True, **kwargs), self.scheduler.remote
        arrival = remote.expect(request_id)
        assert remote.make_room(arrival, self.scheduler.last_step_under_way)
        for index, block_ids in arrival.pages.items():
            self.rank.read_into(block_ids, index, prompt if index < num_good else None)
        remote.settle(request_id, num_good)
        self.scheduler.release(request_id)
        return request_id

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.under_way.append((plan, self.rank.run(plan)))
        outcome = Outcome(outputs=self.scheduler.take_rejected())
        if self.under_way and (plan is None or len(self.under_way) > self.ahead):
            self.scheduler.update(*self.under_way.popleft(), outcome)
        self._receive(outcome)
        return plan

    def fail(self) -> None:
        """The oldest step under way could not be computed, nor any behind it."""
        plan, _ = self.under_way[0]
        self.under_way.clear()
        outcome = Outcome()
        self.scheduler.fail(plan, "device fell over", outcome)
        self._receive(outcome)

    def run(self) -> dict[str, list[int]]:
        """Until every request has ended; sequence (`request` for the first, `request.1` ...) -> output tokens."""
        for _ in range(4000):
            if not self.scheduler.has_work and not self.under_way:
                return self.tokens
            self.step()
        raise AssertionError("requests never ended")

    def _receive(self, outcome: Outcome) -> None:
        for addressed in outcome.outputs:
            output = addressed.output
            name = output.request_id if output.index == 0 else f"{output.request_id}.{output.index}"
            self.outputs.setdefault(name, []).append(output)
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
        for plain in outcome.plain.values():
            tokens = iter(plain.token_ids)
            for request_id, index, number in zip(plain.request_ids, plain.indices, plain.num_tokens, strict=True):
                name = request_id if index == 0 else f"{request_id}.{index}"
                self.tokens[name] += [next(tokens) for _ in range(number)]


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(
        *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32, chunked: bool = True, cache: bool = True,
        policy: PolicyName = "fcfs", ahead: int = 0, groups: tuple[KvGroup, ...] = FULL, drafts: int = 0,
        wrong_drafts: int = 0, num_stages: int = 1, depth: FixedDepth | None = None,
        threshold: int = 0, queue: WaitingQueue | None = None, kv_cache: type[KvCache] = KvCache,
        step_budget: StepBudget | None = None,
    ) -> Engine:  # fmt: skip
        log = KvEventLog(BLOCK_SIZE, groups)
        log.take()
        kv = kv_cache(num_blocks, BLOCK_SIZE, groups, enable_prefix_caching=cache, event_log=log)
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=chunked, num_stages=num_stages, step_budget=step_budget,
        )  # fmt: skip
        depth = FixedDepth(drafts) if drafts else depth
        scheduler = Scheduler(limits, kv, waiting_queue(policy, threshold) if queue is None else queue, depth)
        return Engine(scheduler, kv, FakeRank(BLOCK_SIZE, groups, wrong_drafts), max(ahead, num_stages - 1), log)

    return make
