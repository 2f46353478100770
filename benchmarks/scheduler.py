"""What planning and updating a step of running decodes costs the engine's loop, without a device.

    python benchmarks/scheduler.py

prints a table for several numbers of sequences: microseconds of `schedule` and `update` in a steady state (block
boundaries, hashing and outputs included), medians over many steps. With pipeline stages so many steps are under way,
each with an even part of the sequences.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import AddRequest, SequenceStart
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.limits import SchedulerLimits
from kvasir_runtime.scheduling.scheduler import Scheduler, make_scheduler
from kvasir_runtime.scheduling.step import StepPlan, StepResult
from kvasir_runtime.scheduling.update import Outcome

BLOCK_SIZE = 16
NUM_STEPS = 400
PROMPT_TOKENS = 64


def scheduler_of(num_seqs: int, num_stages: int) -> Scheduler:
    """With so many requests whose prompts are computed."""
    limits = SchedulerLimits(
        max_num_seqs=num_seqs, max_num_batched_tokens=8192, max_model_len=4096, num_stages=num_stages
    )
    num_blocks = num_seqs * (PROMPT_TOKENS + NUM_STEPS + 2 * BLOCK_SIZE) // BLOCK_SIZE
    scheduler = make_scheduler(
        limits, policy="fcfs", num_blocks=num_blocks, block_size=BLOCK_SIZE, groups=(KvGroup((0,), None),),
        enable_prefix_caching=True,
    )  # fmt: skip
    for number in range(num_seqs):
        sampling = SamplingParams(max_tokens=4000, seed=0, stop_token_ids=(2,))
        # Prompts of different lengths, so that block boundaries spread over the steps as they do in life.
        prompt = [3 + number] * (PROMPT_TOKENS - number % BLOCK_SIZE)
        scheduler.add(
            AddRequest(
                request_id=f"cmpl-{number:032d}",
                api_index=0,
                prompt_token_ids=prompt,
                sampling=sampling,
                sequences=[SequenceStart(index=0, seed=number)],
                arrival_time=float(number),
            )
        )
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    num_sampled = int(plan.samples.sum())
    ones = np.ones(num_sampled, dtype=np.int32)
    return StepResult(np.full((num_sampled, 1), 5, dtype=np.int32), ones, np.zeros_like(ones))


def timings(scheduler: Scheduler, num_stages: int) -> Iterator[tuple[float, float]]:
    """Seconds of (schedule, update) of steady steps."""
    under_way: deque[StepPlan] = deque()
    for _ in range(NUM_STEPS):
        start = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        if plan is not None:
            under_way.append(plan)
        oldest = under_way.popleft() if plan is None or len(under_way) == num_stages else None
        if oldest is None:
            continue
        result = result_of(oldest)
        begin = time.thread_time()
        scheduler.update(oldest, result, Outcome())
        yield planned - start, time.thread_time() - begin


def main() -> None:
    print("| sequences | stages | schedule, us | update, us | both, us |\n|---|---|---|---|---|")
    for num_seqs, num_stages in ((1, 1), (8, 1), (64, 1), (256, 1), (256, 2), (256, 4)):
        steps = list(timings(scheduler_of(num_seqs, num_stages), num_stages))[20:]
        schedule, update = (statistics.median(step[part] * 1e6 for step in steps) for part in (0, 1))
        both = statistics.median((step[0] + step[1]) * 1e6 for step in steps)
        print(f"| {num_seqs} | {num_stages} | {schedule:.0f} | {update:.0f} | {both:.0f} |")


if __name__ == "__main__":
    main()
