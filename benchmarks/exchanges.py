"""What ranks exchange in a step, as they count it themselves (a part of parallel.py): the machine does not matter."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scheduled_steps import SIGNS_SECONDS, drive, rank_config, scheduler_of

from kvasir_runtime.config import ParallelConfig
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.parallel.counts import CollectiveTotals, Operation
from kvasir_runtime.ranks.start import running_ranks_of

SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
"""Tensor ranks and pipeline stages."""
NUM_SEQS = 8
NUM_DECODES = 20
"""Of each sequence, that are counted."""
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "send")


@dataclass(frozen=True)
class Exchange:
    calls: float = 0.0
    num_bytes: float = 0.0


Exchanges = dict[Operation, Exchange]


def exchanges(model: Path, on_failure: Callable[[RankFailedError], None]) -> str:
    """A table, a row for each size."""
    lines = [
        f"## What a step exchanges: decodes of {NUM_SEQS} sequences of {model.name} in bfloat16",
        "",
        "By one tensor rank, over all of its stages; bytes are those handed in. S stages step through micro-batches, a "
        "S-th of the sequences each.",
        "",
        "| tensor ranks | stages | " + " | ".join(f"{operation}, calls | bytes" for operation in OPERATIONS)
        + " | bytes a token |",
        "|---" * (3 + 2 * len(OPERATIONS)) + "|",
    ]  # fmt: skip
    for tensor, num_stages in SIZES:
        parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=num_stages)
        of_step, tokens = count_exchanges(model, parallel, on_failure)
        cells = [f"{of_step[operation].calls:.1f} | {of_step[operation].num_bytes:,.0f}" for operation in OPERATIONS]
        num_bytes = sum(exchange.num_bytes for exchange in of_step.values())
        lines.append(f"| {tensor} | {num_stages} | {' | '.join(cells)} | {num_bytes / tokens:,.0f} |")
    return "\n".join(lines)


def count_exchanges(
    model: Path, parallel: ParallelConfig, on_failure: Callable[[RankFailedError], None]
) -> tuple[Exchanges, float]:
    """(of one tensor rank in a step, tokens of a step)."""
    num_stages, config = parallel.pipeline_parallel_size, rank_config(str(model), NUM_SEQS, parallel)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_ranks_of(config, Path(folder), 0, on_failure) as ranks,
    ):
        scheduler = scheduler_of(NUM_SEQS, num_stages, ranks.description)
        drive(ranks.executor, scheduler, num_stages, until=2 * NUM_SEQS)  # prompts, and the first decodes
        before = so_far(Path(folder))
        num_steps, num_tokens = drive(ranks.executor, scheduler, num_stages, until=NUM_DECODES * NUM_SEQS)
        after = so_far(Path(folder))
    each = num_steps * parallel.tensor_parallel_size
    of_step = {
        operation: Exchange(
            (after[operation].calls - before[operation].calls) / each,
            (after[operation].num_bytes - before[operation].num_bytes) / each,
        )
        for operation in OPERATIONS
    }
    return of_step, num_tokens / num_steps


def so_far(folder: Path) -> Exchanges:
    """Of all ranks."""
    time.sleep(SIGNS_SECONDS)
    counted = {total.operation: Exchange(total.calls, total.num_bytes) for total in CollectiveTotals(folder, 1).read()}
    return {operation: counted.get(operation, Exchange()) for operation in OPERATIONS}
