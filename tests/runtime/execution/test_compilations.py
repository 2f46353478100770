"""All that serving runs is compiled before it: on a GPU, and under the interpreter by the keys of what is launched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.runtime.compilations import Compilations
from tests.runtime.exactness.conftest import BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PLAIN, engine_over
from tests.runtime.exactness.speculators import NUM_DRAFTS, speculative_config
from tests.runtime.kernels.triton_device import DEVICE, GPU_MARKS
from tests.runtime.watched_platform import WatchedPlatform
from torch import Tensor

from kvasir_runtime.attention.backend import DecodeBounds
from kvasir_runtime.attention.triton import TritonAttention
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.execution.executor import Executor
from kvasir_runtime.execution.platform import Platform
from kvasir_runtime.execution.transfers import Transfers, pack, unpack
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.kernels.attention_tiles import splits_for
from kvasir_runtime.kernels.ops_triton import triton_ops, triton_step_ops
from kvasir_runtime.kernels.rms_norm_triton import triton_rms_norm
from kvasir_runtime.speculative.depth import FixedDepth
from kvasir_runtime.speculative.select import proposer_of

GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
PENALISED = {"presence_penalty": 0.5, "logprobs": 2}
SHORT_SPLITS = splits_for(2, num_sms=1, unit_keys=32)
pytestmark = GPU_MARKS
ON_GPU = DEVICE.type == "cuda"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    return Compilations(monkeypatch)


def as_on_a_gpu() -> Platform:
    """Without one: its kernels, and its packed uploads. Short sequences cross from one split of their keys to two."""
    if ON_GPU:
        return WatchedPlatform(DEVICE, backend=short_splits)
    return WatchedPlatform(
        ops=triton_ops(),
        step_ops=triton_step_ops(),
        backend=short_splits,
        transfers=PackedTransfers(DEVICE),
        graph_bytes=0,
    )


def short_splits(name: str, bounds: DecodeBounds, kv_cache_dtype: str) -> TritonAttention:
    return TritonAttention(DEVICE, bounds, num_sms=1, split_unit_keys=SHORT_SPLITS.unit_keys)


class PackedTransfers(Transfers):
    def upload(self, *arrays: NDArray[np.generic]) -> tuple[Tensor, ...]:
        return unpack(pack(arrays, pin_memory=False), arrays)


@pytest.fixture
def executors() -> Iterator[list[Executor]]:
    made: list[Executor] = []
    yield made
    for executor in made:
        executor.close()


def load(folder: Path, speculative: SpeculativeConfig | None) -> Worker:
    execution = ExecutionConfig(num_threads=1, speculative_config=speculative)
    return load_worker(
        ModelConfig(model=str(folder), device=DEVICE.type, dtype="bfloat16"),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=64),
        execution,
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        proposer_of(execution),
        platform=as_on_a_gpu(),
    )


def test_an_argument_of_another_kind_counts_once(compilations: Compilations) -> None:
    weight = torch.ones(33, device=DEVICE)
    numbers = []
    for width in (32, 32, 33, 33, 32):
        triton_rms_norm(torch.ones((2, width), device=DEVICE), weight[:width], 1e-6)
        numbers.append(len(compilations.kernels))
    assert numbers == [1, 1, 2, 2, 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # warming up attends to what memory happens to hold
@pytest.mark.parametrize("method", [None, "draft_model", "eagle"])
def test_nothing_compiles_while_prompts_and_batches_of_many_sizes_are_served(
    method: str | None, folder: Path, tmp_path: Path, compilations: Compilations, executors: list[Executor]
) -> None:
    speculative = None if method is None else speculative_config(method, folder, folder, tmp_path / "heads")
    worker = load(folder, speculative)
    executors.append(Executor(worker.runner, worker.prepare_thread))
    depth = None if method is None else FixedDepth(NUM_DRAFTS - 1)  # chunks begin at odd tokens of a step, too
    engine = engine_over(executors[0], worker.description, PLAIN, depth)
    assert compilations.kernels, "warming up compiles"
    compilations.kernels.append("serving")
    random = np.random.default_rng(0)
    for number, (length, params) in enumerate(
        [(1, GREEDY), (17, SAMPLED), (2, PENALISED), (40, GREEDY), (16, SAMPLED), (33, GREEDY)]
    ):
        engine.add(str(number), random.integers(0, 64, length).tolist(), max_tokens=2 + number, **params)
        engine.core.step()  # each joins those before it
    outputs = engine.finish(*map(str, range(6))).outputs
    assert [outputs[str(number)][-1].finish_reason for number in range(6)] == ["length"] * 6
    assert [SHORT_SPLITS.count(num_keys) for num_keys in (16, 33, 40 + 2 + 3)] == [1, 2, 2]
    assert compilations.kernels[-1] == "serving"
