"""Steps that the scheduler plans, on ranks in this process and its children, for the benchmarks of ranks."""

from collections import deque
from typing import Any

from kvasir_runtime.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from kvasir_runtime.engine.core import StepExecutor
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import Outcome
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.scheduler import Scheduler, make_scheduler
from kvasir_runtime.scheduling.step import SchedulerLimits, StepPlan

CONTEXT = 64
"""Tokens of a prompt."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
SIGNS_SECONDS = 2.5
"""After which signs of life have brought all counts."""


def rank_config(model: str, size: int, parallel: ParallelConfig) -> RuntimeConfig:
    """A thread each."""
    return RuntimeConfig(
        model=ModelConfig(model=model, device="cpu", dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=size * MAX_MODEL_LEN // BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=size),
        execution=ExecutionConfig(num_threads=1),
        parallel=parallel,
    )


def scheduler_of(size: int, num_stages: int, rank: RankDescription) -> Scheduler:
    """With so many requests, none of which ends by itself."""
    limits = SchedulerLimits(
        max_num_seqs=size,
        max_num_batched_tokens=rank.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        num_stages=num_stages,
    )
    scheduler = make_scheduler(
        limits, policy="fcfs", num_blocks=rank.num_blocks, block_size=BLOCK_SIZE, groups=rank.layout.groups,
        enable_prefix_caching=False,
    )  # fmt: skip
    for number in range(size):
        sampling = SamplingParams(max_tokens=400, seed=0, temperature=0.0)
        start = [SequenceStart(index=0, seed=0)]
        scheduler.add(
            AddRequest(
                request_id=f"{number}", api_index=0, sequences=start, arrival_time=float(number),
                spec=RequestSpec(prompt_token_ids=[number + 3] * CONTEXT, sampling=sampling),
            )
        )  # fmt: skip
    return scheduler


def drive(executor: StepExecutor, scheduler: Scheduler, num_stages: int, until: int) -> tuple[int, int]:
    """Step as the engine core does until so many tokens are drawn: (steps, tokens)."""
    under_way: deque[tuple[StepPlan, Any]] = deque()
    num_steps = num_tokens = 0
    while num_tokens < until or under_way:
        plan = scheduler.schedule() if num_tokens < until else None
        if plan is not None:
            executor.forward(plan)
            under_way.append((plan, executor.sample()))
        if plan is None or len(under_way) == num_stages:
            oldest, future = under_way.popleft()
            result = future.result().result()
            scheduler.update(oldest, result, Outcome())
            num_steps, num_tokens = num_steps + 1, num_tokens + int(result.num_accepted.sum())
    return num_steps, num_tokens
