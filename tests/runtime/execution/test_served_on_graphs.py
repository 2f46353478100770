"""A whole model served on graphs, with drafts of different numbers: every decode runs on one, and no token changes.

On a GPU graphs are CUDA's; elsewhere steps are padded as theirs are, and missing drafts computed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.exactness.conftest import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PLAIN, engine_over
from tests.runtime.exactness.speculators import NUM_DRAFTS, speculative_config
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS
from tests.runtime.padded_graphs import PaddedGraphs
from tests.runtime.watched_platform import WatchedPlatform

from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.graphs import GraphShape, graph_sizes
from kvasir_runtime.execution.platform import GraphSetup
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.kernels.step_ops import reference_step_ops
from kvasir_runtime.speculative.depth import Depths, FixedDepth, IntArray
from kvasir_runtime.speculative.select import proposer_of

pytestmark = GPU_MARKS
ON_GPU = DEVICE.type == "cuda"
SAMPLED = {"temperature": 1.2, "top_p": 0.9, "seed": 3}


class DifferentDepths(FixedDepth):
    """Each row's own, which changes from step to step."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFTS)
        object.__setattr__(self, "calls", iter(range(10_000)))

    def depths(self, rows: IntArray) -> Depths:
        return (np.asarray(rows, dtype=np.int64) + next(self.calls)) % (1 + NUM_DRAFTS)


@pytest.fixture
def executors() -> Iterator[list[Executor]]:
    made: list[Executor] = []
    yield made
    for executor in made:
        executor.close()


def on_graphs(graph_bytes: int = 2**30) -> WatchedPlatform:
    """With memory for all, since a tiny model's steps take less than a graph."""
    if ON_GPU:
        return WatchedPlatform(DEVICE, graph_bytes=graph_bytes)
    return WatchedPlatform(
        step_ops=reference_step_ops(drops_missing_drafts=False),
        backend=lambda *choice: ReferenceAttention(),
        graph_bytes=graph_bytes,
        make_graphs=padded_graphs,
    )


def padded_graphs(setup: GraphSetup) -> PaddedGraphs:
    sizes = graph_sizes(setup.max_num_seqs)
    return PaddedGraphs(setup.block_tables, setup.max_seq_len, sizes, setup.num_bytes, setup.extras)


def load(folder: Path, platform: WatchedPlatform, speculative: SpeculativeConfig | None = None) -> Worker:
    execution = ExecutionConfig(num_threads=1, speculative_config=speculative)
    return load_worker(
        ModelConfig(model=str(folder), device=DEVICE.type, dtype="float32"),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=64),
        execution,
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        proposer_of(execution),
        platform=platform,
    )


def serve(worker: Worker, executor: Executor, depth: FixedDepth | None) -> list[list[int]]:
    """Tokens of five requests that join and leave each other."""
    engine = engine_over(executor, worker.description, PLAIN, depth)
    random = np.random.default_rng(0)
    for number, length in enumerate((1, 17, 2, 30, 9)):
        sampling: dict[str, Any] = SAMPLED if number == 1 else {}
        engine.add(str(number), random.integers(0, 64, length).tolist(), max_tokens=12 + 4 * number, **sampling)
        engine.core.step()
    generated = engine.finish(*map(str, range(5)))
    return [generated.token_ids(str(number)) for number in range(5)]


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle"])
def test_graphs_serve_every_decode_and_change_no_token(
    method: str | None, folder: Path, tmp_path: Path, executors: list[Executor]
) -> None:
    plain = load(folder, on_graphs(graph_bytes=0))
    executors.append(Executor(plain.runner, plain.prepare_thread))
    expected = serve(plain, executors[0], None)
    assert [len(set(tokens)) > 4 for tokens in expected] == [True] * 5

    speculative = None if method is None else speculative_config(method, folder, folder, tmp_path / "heads")
    platform = on_graphs()
    worker = load(folder, platform, speculative)
    while worker.runner.use_idle_time():
        pass
    assert GraphShape(MAX_NUM_SEQS, 2, 1 + NUM_DRAFTS) in platform.shapes or method is None
    platform.target.clear()
    executors.append(Executor(worker.runner, worker.prepare_thread))
    assert serve(worker, executors[1], None if method is None else DifferentDepths()) == expected
    assert platform.target.lengths, "prompts are computed"
    # A padded graph computes its steps anew, a CUDA graph none.
    assert platform.target.num_replays > 0
    assert platform.target.num_decodes_only == (0 if ON_GPU else platform.target.num_replays)
