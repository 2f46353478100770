"""What planning and updating a step of running decodes costs the engine's loop, without a device.

    python benchmarks/scheduler.py [--also /another/checkout] [--rounds 20]

prints a table for several numbers of sequences: microseconds of `schedule` and `update` in a steady state (block
boundaries, hashing and outputs included), medians over many steps. With pipeline stages so many steps are under way,
each with an even part of the sequences. With drafts the depth adapts, to steps that are said to cost what makes them
pay; each draft holds with a fixed chance where those before it do, and what that brings stands beside.

A machine's speed may swing by more than two versions differ. With `--also` the scripts of this and other checkouts run
in turns instead, in processes of their own, and what they say of 256 sequences on one stage stands together.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import Outcome
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.scheduler import Scheduler, make_scheduler
from kvasir_runtime.scheduling.step import SchedulerLimits, StepPlan, StepResult, TimedStep
from kvasir_runtime.speculative.depth import DepthPolicy

BLOCK_SIZE = 16
NUM_STEPS = 400
WARM_UP_STEPS = 20
PROMPT_TOKENS = 64
ACCEPTANCE = 0.7
PLAIN_SECONDS, DRAFT_SECONDS = 0.020, 0.001
"""What a step is said to take, and each draft of all sequences besides."""


@dataclass(frozen=True)
class Load:
    """A row of the table."""

    num_seqs: int
    num_stages: int = 1
    num_drafts: int = 0


@dataclass(frozen=True)
class Timing:
    """Of one step."""

    schedule_seconds: float
    update_seconds: float
    tokens_per_sequence: float


LOADS = (
    Load(1),
    Load(8),
    Load(64),
    Load(256),
    Load(256, num_stages=2),
    Load(256, num_stages=4),
    Load(256, num_drafts=4),
)


def depth_of(load: Load) -> DepthPolicy | None:
    return DepthPolicy(load.num_seqs, load.num_drafts) if load.num_drafts else None


def scheduler_of(load: Load, depth: DepthPolicy | None) -> Scheduler:
    """With so many requests whose prompts are computed."""
    limits = SchedulerLimits(
        max_num_seqs=load.num_seqs, max_num_batched_tokens=8192, max_model_len=4096, num_stages=load.num_stages
    )
    most_tokens = PROMPT_TOKENS + NUM_STEPS * (1 + load.num_drafts) + 2 * BLOCK_SIZE
    scheduler = make_scheduler(
        limits, policy="fcfs", num_blocks=load.num_seqs * most_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE,
        groups=(KvGroup((0,)),), enable_prefix_caching=True, depth=depth,
    )  # fmt: skip
    for number in range(load.num_seqs):
        sampling = SamplingParams(max_tokens=4000, seed=0, stop_token_ids=(2,))
        # Prompts of different lengths, so that block boundaries spread over the steps as they do in life.
        prompt = [3 + number] * (PROMPT_TOKENS - number % BLOCK_SIZE)
        scheduler.add(
            AddRequest(
                request_id=f"cmpl-{number:032d}",
                api_index=0,
                spec=RequestSpec(prompt_token_ids=prompt, sampling=sampling),
                sequences=[SequenceStart(index=0, seed=number)],
                arrival_time=float(number),
            )
        )
    return scheduler


def result_of(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    num_drafts = plan.num_new_tokens[plan.samples] - 1
    num_drafts[plan.num_decodes :] = 0
    most = int(num_drafts.max(initial=0))
    holds = rng.random((len(num_drafts), most)) < ACCEPTANCE
    num_accepted = 1 + np.minimum(holds.cumprod(1).sum(1), num_drafts).astype(np.int32)
    return StepResult(np.full((len(num_drafts), 1 + most), 5, dtype=np.int32), num_accepted, num_drafts)


def timed(plan: StepPlan, result: StepResult) -> TimedStep:
    num_asked = int(result.num_drafts.sum())
    seconds = PLAIN_SECONDS + DRAFT_SECONDS * num_asked / max(1, plan.num_decodes)
    return TimedStep(
        num_decodes=plan.num_decodes, num_prompt_tokens=plan.num_tokens - plan.num_decodes - num_asked,
        num_asked=num_asked, num_accepted=int((result.num_accepted - 1).sum()), num_proposals=plan.num_proposals,
        seconds=seconds, clock_seconds=seconds,
    )  # fmt: skip


def timings(load: Load) -> Iterator[Timing]:
    """Of steady steps."""
    depth, rng = depth_of(load), np.random.default_rng(0)
    scheduler = scheduler_of(load, depth)
    under_way: deque[StepPlan] = deque()
    for _ in range(NUM_STEPS):
        start = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        if plan is not None:
            under_way.append(plan)
        oldest = under_way.popleft() if plan is None or len(under_way) == load.num_stages else None
        if oldest is None:
            continue
        result = result_of(oldest, rng)
        step = timed(oldest, result)
        begin = time.thread_time()
        if depth is not None:
            depth.observe_step(step)
        scheduler.update(oldest, result, Outcome())
        yield Timing(planned - start, time.thread_time() - begin, float(result.num_accepted.mean()))


def print_table() -> None:
    print("| sequences | stages | drafts | tokens a step | schedule, us | update, us | both, us |")
    print("|---" * 7 + "|")
    for load in LOADS:
        steps = list(timings(load))[WARM_UP_STEPS:]
        schedule = statistics.median(step.schedule_seconds * 1e6 for step in steps)
        update = statistics.median(step.update_seconds * 1e6 for step in steps)
        both = statistics.median((step.schedule_seconds + step.update_seconds) * 1e6 for step in steps)
        tokens = statistics.mean(step.tokens_per_sequence for step in steps)
        print(
            f"| {load.num_seqs} | {load.num_stages} | {load.num_drafts or ''} | {tokens:.2f} | {schedule:.0f} "
            f"| {update:.0f} | {both:.0f} |"
        )


def compare(folders: list[Path], num_rounds: int) -> None:
    figures: dict[Path, list[int]] = {folder: [] for folder in folders}
    for _ in range(num_rounds):
        for folder, own in figures.items():
            own.append(decode_micros(folder))
    print("| checkout | best, us | quartile | median | mean |")
    print("|---" * 5 + "|")
    for folder, own in figures.items():
        quartile, median, _ = statistics.quantiles(own, method="inclusive")
        print(f"| {folder} | {min(own)} | {quartile:.0f} | {median:.0f} | {statistics.mean(own):.0f} |")


def decode_micros(folder: Path) -> int:
    """What a checkout's own script prints in the last column of the first row of 256 sequences, one stage."""
    table = subprocess.run(
        [sys.executable, folder / "benchmarks" / "scheduler.py"],
        env={**os.environ, "PYTHONPATH": str(folder / "runtime")}, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return next(int(cells[-1]) for cells in rows if cells[:2] == ["256", "1"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--also", type=Path, action="append", default=[], metavar="FOLDER", help="another checkout")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.also:
        compare([Path(__file__).parents[1], *options.also], options.rounds)
    else:
        print_table()


if __name__ == "__main__":
    main()
