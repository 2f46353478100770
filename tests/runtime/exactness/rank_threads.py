"""Ranks as threads of the test's process, over real collectives; every step's results are compared between them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.runtime.exactness.conftest import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    byte_vocabulary,
)

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, PoolerConfig, SchedulerConfig
from kvasir_runtime.execution.executor import Executor, PendingResult
from kvasir_runtime.execution.platform import Platform
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.parallel.groups import RankGroups, meet, open_meeting
from kvasir_runtime.parallel.meeting_point import LOOPBACK, MeetingPoint
from kvasir_runtime.parallel.shared_segment import SharedSegment, segment_bytes
from kvasir_runtime.parallel.topology import RankPlace, Topology
from kvasir_runtime.scheduling.step import StepPlan, StepResult
from kvasir_runtime.speculative.select import proposer_of


@dataclass(frozen=True)
class AgreedResult:
    futures: Sequence[Future[PendingResult]]

    def result(self) -> StepResult:
        first, *others = [future.result().result() for future in self.futures]
        for other in others:
            assert np.array_equal(other.token_ids, first.token_ids)
            assert np.array_equal(other.num_accepted, first.num_accepted)
            assert np.array_equal(other.num_drafts, first.num_drafts)
        return first


class RankThreads:
    """A `StepExecutor` over all ranks of an engine; those of the last stage report."""

    def __init__(self, workers: Sequence[Worker], groups: Sequence[RankGroups]) -> None:
        self.workers = workers
        self.groups = groups
        self._executors = [Executor(worker.runner, worker.prepare_thread, worker.prepare_grammar) for worker in workers]

    def forward(self, plan: StepPlan) -> None:
        for executor in self._executors:
            executor.forward(plan)

    def sample(self) -> Any:
        agreed: Future[AgreedResult] = Future()
        futures = [executor.sample() for executor in self._executors]
        agreed.set_result(AgreedResult(futures[self.groups[0].place.topology.reporter :]))
        return agreed

    def prepare_grammar(self, grammar: str) -> Any:
        """Of one rank after the other."""
        *_, last = [executor.prepare_grammar(grammar) for executor in self._executors]
        return last

    def recover(self) -> None:
        """Stages find out by the plans."""
        assert self.groups[0].place.pipeline_size > 1, "a step failed"

    def use_idle_time(self) -> None:
        """Threads have nothing to do."""

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


def meet_all(topology: Topology, folder: Path, backend: Any = "gloo", host: str = LOOPBACK) -> list[RankGroups]:
    """One end for each rank."""
    segments = [SharedSegment.create(segment_bytes(topology.tensor_size)) for _ in range(topology.pipeline_size)]
    device = torch.device("cpu")

    def meet_others(place: RankPlace) -> RankGroups:
        store = open_meeting(MeetingPoint(folder / "meeting"), topology.num_ranks)
        return meet(place, store, host, device, backend, segments[place.pipeline_rank])

    with ThreadPoolExecutor(topology.num_ranks) as pool:
        return list(pool.map(meet_others, topology.places()))


def start_ranks(
    model: Path,
    folder: Path,
    size: int,
    backend: Any = "shared_memory",
    num_stages: int = 1,
    *,
    expert_parallel: bool = False,
    layer_partition: tuple[int, ...] | None = None,
    kv_cache_dtype: Any = "auto",
    platforms: Mapping[int, Platform] | None = None,
    runner: Any = "auto",
    pooler_config: PoolerConfig | None = None,
    **execution: Any,
) -> RankThreads:
    """`size` ranks a stage; `platforms` by rank, where they are not the device's own."""
    topology = Topology(
        tensor_size=size, pipeline_size=num_stages, layer_partition=layer_partition, expert_parallel=expert_parallel
    )
    groups = meet_all(topology, folder, backend)

    def load(own: RankGroups) -> Worker:
        return load_worker(
            ModelConfig(
                model=str(model),
                max_model_len=MAX_MODEL_LEN,
                device="cpu",
                runner=runner,
                pooler_config=pooler_config,
            ),
            CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype),
            ExecutionConfig(num_threads=1, **execution),
            SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
            proposer_of(ExecutionConfig(**execution)),
            own,
            None if platforms is None else platforms.get(own.place.rank),
            byte_vocabulary,
        )

    with ThreadPoolExecutor(len(groups)) as pool:
        return RankThreads(list(pool.map(load, groups)), groups)
