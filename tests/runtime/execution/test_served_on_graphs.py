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

from kvasir_runtime.attention.reference import ReferenceAttention
from kvasir_runtime.attention.step_lengths import StepLengths
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution import worker as worker_module
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.graphs import DecodeGraphs, GraphShape, graph_sizes
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.runner_assembly import RunnerAssembly
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


@pytest.fixture
def _on_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for all, since a tiny model's steps take less than a graph."""
    make_runner = RunnerAssembly.runner
    monkeypatch.setattr(RunnerAssembly, "runner", lambda self, num_blocks, *_: make_runner(self, num_blocks, 2**30))
    if ON_GPU:
        return

    def graphs(assembly: RunnerAssembly, rows: Rows, graph_bytes: int) -> PaddedGraphs:
        limits = assembly.limits
        return PaddedGraphs(rows.block_tables, limits.max_model_len, graph_sizes(limits.max_num_seqs), graph_bytes)

    monkeypatch.setattr(RunnerAssembly, "_graphs", graphs)
    monkeypatch.setattr(worker_module, "_step_ops_of", lambda device: reference_step_ops(drops_missing_drafts=False))
    monkeypatch.setattr(worker_module, "select_backend", lambda *choice: ReferenceAttention())


def load(folder: Path, speculative: SpeculativeConfig | None = None) -> Worker:
    execution = ExecutionConfig(num_threads=1, speculative_config=speculative)
    return load_worker(
        ModelConfig(model=str(folder), device=DEVICE.type, dtype="float32"),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=64),
        execution,
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        proposer_of(execution),
    )


def graphs_of(worker: Worker) -> DecodeGraphs:
    """Of the target."""
    graphs = worker.runner._compute  # type: ignore[attr-defined]
    assert isinstance(graphs, DecodeGraphs)
    return graphs


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


class EagerSteps:
    """Steps that ran kernel by kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graphs: DecodeGraphs) -> None:
        self.lengths: list[StepLengths] = []
        eager = graphs._eager
        monkeypatch.setattr(
            graphs,
            "_eager",
            lambda inputs, *args, **options: self.lengths.append(inputs.lengths) or eager(inputs, *args, **options),
        )

    @property
    def num_decodes_only(self) -> int:
        return sum(lengths.num_decodes == len(lengths.query_lens) for lengths in self.lengths)


@pytest.mark.usefixtures("_on_graphs")
@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle"])
def test_graphs_serve_every_decode_and_change_no_token(
    method: str | None, folder: Path, tmp_path: Path, executors: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(folder)
    executors.append(Executor(plain.runner, plain.prepare_thread))
    graphs_of(plain)._wanted.clear()  # kernel by kernel
    expected = serve(plain, executors[0], None)
    assert [len(set(tokens)) > 4 for tokens in expected] == [True] * 5

    speculative = None if method is None else speculative_config(method, folder, folder, tmp_path / "heads")
    worker = load(folder, speculative)
    graphs = graphs_of(worker)
    while worker.runner.use_idle_time():
        pass
    assert GraphShape(MAX_NUM_SEQS, 2, 1 + NUM_DRAFTS) in graphs.captured or method is None
    eager = EagerSteps(monkeypatch, graphs)
    executors.append(Executor(worker.runner, worker.prepare_thread))
    assert serve(worker, executors[1], None if method is None else DifferentDepths()) == expected
    assert eager.lengths, "prompts are computed"
    assert not eager.num_decodes_only
