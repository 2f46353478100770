"""What ranks of an engine cost on one machine's CPUs: collectives, the way of a step, whole steps, pipeline stages.

    python benchmarks/parallel.py [--model llama-100m] [--ranks 2]

All-reduces are timed between processes (all_reduce.py); a step's way is a plan of 256 decodes to all ranks and a result
back, with nothing computed; whole steps are decodes of a model with random weights by one rank and by several, each
over the backends. Pipeline stages of a thread each decode as many sequences as one rank, planned by the scheduler; a
stage waits while its process takes no core, so nothing else may run beside. What ranks exchange in a step is counted by
them (exchanges.py). `--only exchanges` prints one part and writes nothing.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
from all_reduce import CPU_BACKENDS, all_reduces
from exchanges import exchanges
from random_models import make_model
from scheduled_steps import BLOCK_SIZE, CONTEXT, SIGNS_SECONDS, drive, rank_config, scheduler_of
from servers import WORK

from kvasir_runtime.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.ranks.links import CoreLinks, LinkAddresses, RankLinks, ipc_addresses
from kvasir_runtime.ranks.messages import Forward, Sample, StepDone
from kvasir_runtime.ranks.start import running_ranks_of
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import NewSequence, StepPlan, StepResult, StepTimes

RESULTS = Path(__file__).parent / "results"
SHAPES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 4096), (64, 4096), (256, 4096), (2048, 4096))
"""Tokens of a step, hidden size."""
NUM_SEQS = 256
NUM_DECODES = 60
SAMPLING = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2000, help="of a step's way; a part of them of other things")
    parser.add_argument("--only", choices=("collectives", "way", "steps", "stages", "exchanges"))
    parser.add_argument("--work", type=Path, default=WORK, help="where models are kept")
    options = parser.parse_args(arguments)
    model = make_model(options.model, options.work / "models")
    parts = {
        "collectives": lambda: all_reduces(options.ranks, SHAPES),
        "way": lambda: way_of_a_step(options.ranks, options.rounds),
        "steps": lambda: steps(options, model),
        "stages": lambda: stages(options, model),
        "exchanges": lambda: exchanges(model, show),
    }
    if options.only is not None:
        print(parts[options.only](), flush=True)
        return
    text = "\n\n".join([heading(options), *(part() for part in parts.values())])
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"parallel-{date.today()}.md"
    path.write_text(text + "\n")
    print(path.read_text() + f"\nwritten to {path}", flush=True)


def show(failure: RankFailedError) -> None:
    print(failure, flush=True)


def heading(options: argparse.Namespace) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return (
        f"# Ranks on one machine, {date.today()}\n\n`python benchmarks/parallel.py --model {options.model} "
        f"--ranks {options.ranks}` on {len(os.sched_getaffinity(0))} cores ({cpu}), Linux {platform.release()}, torch "
        f"{torch.__version__}; load average at the start {os.getloadavg()[0]:.1f}."
    )


# The way of a step


def way_of_a_step(num_ranks: int, num_rounds: int) -> str:
    """The core's thread sends a plan and waits for the result of one rank, over and over."""
    result = StepResult(
        token_ids=np.zeros((NUM_SEQS, 1), dtype=np.int32),
        num_accepted=np.ones(NUM_SEQS, dtype=np.int32),
        num_drafts=np.zeros(NUM_SEQS, dtype=np.int32),
        times=StepTimes(processor_seconds=0.0),
    )
    plan = decodes(NUM_SEQS, 1)
    with tempfile.TemporaryDirectory() as folder:
        addresses = ipc_addresses(Path(folder), num_ranks)
        links, context = CoreLinks(addresses), multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=echo, args=(addresses, rank, result), daemon=True) for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            links.receive(60)
        sending, whole = [], []
        for _ in range(num_rounds):
            start = time.perf_counter()
            links.send(Forward(plan))
            links.send(Sample())
            sending.append(time.perf_counter() - start)
            while not links.receive(10):
                pass
            whole.append(time.perf_counter() - start)
        for process in processes:
            process.kill()
            process.join()
        links.close()
    return (
        f"## The way of a step of {NUM_SEQS} decodes, {num_ranks} ranks, us (medians of {num_rounds:,})\n\n"
        f"Sending takes the core {statistics.median(sending) * 1e6:.0f}; from the plan to the result, "
        f"with nothing computed, {statistics.median(whole) * 1e6:.0f} pass."
    )


def echo(addresses: LinkAddresses, rank: int, result: StepResult) -> None:
    links = RankLinks(addresses, rank)
    links.send(StepDone(result))  # that it is there
    while True:
        if isinstance(links.receive(), Sample) and rank == 0:
            links.send(StepDone(result))


# Whole steps


@dataclass(frozen=True)
class Way:
    name: str
    parallel: ParallelConfig


def steps(options: argparse.Namespace, model: Path) -> str:
    ways = [Way("one rank", ParallelConfig())]
    for backend in CPU_BACKENDS if options.ranks > 1 else ():
        parallel = ParallelConfig(tensor_parallel_size=options.ranks, collective_backend=backend)
        ways.append(Way(f"{options.ranks} ranks, {backend}", parallel))
    lines = [
        f"## Decodes of {options.model} in bfloat16, {CONTEXT} tokens of context",
        "",
        "| | " + " | ".join(f"{size} sequences, ms" for size in options.batch_sizes) + " |",
        "|---" * (len(options.batch_sizes) + 1) + "|",
    ]
    for way in ways:
        with step_times(str(model), way.parallel, max(options.batch_sizes), 5 + options.rounds // 36) as measure:
            times = [f"{measure(size) * 1e3:.2f}" for size in options.batch_sizes]
            lines.append(f"| {way.name} | {' | '.join(times)} |")
    return "\n".join(lines)


@contextlib.contextmanager
def step_times(model: str, parallel: ParallelConfig, most: int, num_timed: int) -> Iterator[Callable[[int], float]]:
    """A function: seconds of a decode of so many sequences (median of all but the first)."""
    num_cores = len(os.sched_getaffinity(0))
    config = RuntimeConfig(
        model=ModelConfig(model=model, device="cpu", dtype="bfloat16", max_model_len=512),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=most * 512 // BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=most),
        execution=ExecutionConfig(num_threads=max(1, num_cores // parallel.tensor_parallel_size)),
        parallel=parallel,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_ranks_of(config, Path(folder), 0, show) as ranks,
    ):
        executor = ranks.executor

        def measure(size: int) -> float:
            times = []
            for number in range(num_timed):
                plan = decodes(size, number)
                start = time.perf_counter()
                executor.forward(plan)
                executor.sample().result().result()
                times.append(time.perf_counter() - start)
            return statistics.median(times[5:])

        yield measure


def decodes(size: int, number: int) -> StepPlan:
    """The `number`th decode of so many sequences, the first of which brings them with CONTEXT computed tokens."""
    blocks = np.arange(size * 512 // BLOCK_SIZE)
    per_sequence = 512 // BLOCK_SIZE
    tables = np.stack([blocks // per_sequence, 0 * blocks, blocks % per_sequence, blocks], axis=1).astype(np.int32)
    spec = RequestSpec(prompt_token_ids=[1] * CONTEXT, sampling=SAMPLING)
    added = tuple(NewSequence(row, spec, [], CONTEXT - 1) for row in range(size))
    return StepPlan(
        number=number,
        added=added if number == 0 else (),
        forks=(),
        table_writes=tables if number == 0 else tables[:0],
        token_writes=np.empty((0, 3), dtype=np.int32),
        block_copies=np.empty((0, 2), dtype=np.int32),
        rows=np.arange(size, dtype=np.int32),
        num_decodes=size,
        num_new_tokens=np.ones(size, dtype=np.int32),
        starts=np.full(size, CONTEXT - 1 + number, dtype=np.int32),
        samples=np.ones(size, dtype=np.bool_),
    )


# Pipeline stages


def stages(options: argparse.Namespace, model: Path) -> str:
    lines = [
        f"## {NUM_DECODES} tokens each of many sequences of {options.model} in bfloat16, {CONTEXT} tokens of prompt",
        "",
        "| sequences | stages | tokens a second | bytes between stages a step | share of time that each stage waits |",
        "|---|---|---|---|---|",
    ]
    for size in options.batch_sizes:
        for num_stages in options.stages:
            lines.append(f"| {size} | {num_stages} | {' | '.join(run_stages(str(model), size, num_stages))} |")
    return "\n".join(lines)


def run_stages(model: str, size: int, num_stages: int) -> list[str]:
    """Tokens a second, bytes a step, and the share of waiting of each rank, as text."""
    config = rank_config(model, size, ParallelConfig(pipeline_parallel_size=num_stages))
    with (
        tempfile.TemporaryDirectory() as folder,
        running_ranks_of(config, Path(folder), 0, show) as ranks,
    ):
        executor, rank = ranks.executor, ranks.description
        scheduler = scheduler_of(size, num_stages, rank)
        totals = CollectiveTotals(Path(folder), 1)
        drive(executor, scheduler, num_stages, until=2 * size)  # prompts, and the first decodes
        if num_stages > 1:
            time.sleep(SIGNS_SECONDS)  # signs of life bring the counts
        before, cpu_before, start = sent_bytes(totals), rank_seconds(num_stages), time.perf_counter()
        num_steps, num_tokens = drive(executor, scheduler, num_stages, until=NUM_DECODES * size)
        seconds = time.perf_counter() - start
        waiting = [1 - (now - then) / seconds for now, then in zip(rank_seconds(num_stages), cpu_before, strict=True)]
        if num_stages > 1:
            time.sleep(SIGNS_SECONDS)
        num_bytes = (sent_bytes(totals) - before) / num_steps
    return [f"{num_tokens / seconds:.0f}", f"{num_bytes:,.0f}", ", ".join(f"{share:.0%}" for share in waiting)]


def sent_bytes(totals: CollectiveTotals) -> float:
    return sum(total.num_bytes for total in totals.read() if total.operation == "send")


def rank_seconds(num_stages: int) -> list[float]:
    """Processor seconds of each rank's process so far; of this one where the only rank is a thread of it."""
    if num_stages == 1:
        return [time.process_time()]
    ticks = os.sysconf("SC_CLK_TCK")
    children = sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children]
    return [(int(of[11]) + int(of[12])) / ticks for of in fields]


if __name__ == "__main__":
    main()
