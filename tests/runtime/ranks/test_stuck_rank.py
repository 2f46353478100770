"""A rank's process that lives, beats and computes nothing, while the other waits for it."""

from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from benchmarks.scheduled_steps import drive, rank_config, scheduler_of

from kvasir_runtime.config import ParallelConfig, ServerConfig
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.ranks import liveness
from kvasir_runtime.ranks.start import running_ranks_of

MODEL = Path("examples/models/kvasir-python-700k")


def test_it_is_named_while_its_process_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "AWAITED_SECONDS", 2.0)
    config = replace(
        rank_config(str(MODEL), 2, ParallelConfig(tensor_parallel_size=2)), server=ServerConfig(stall_seconds=6)
    )
    failures = SimpleQueue[RankFailedError]()
    with running_ranks_of(config, tmp_path, 0, failures.put) as ranks:
        scheduler = scheduler_of(2, 1, ranks.description)
        drive(ranks.executor, scheduler, 1, until=8)
        links = ranks.executor._links
        with monkeypatch.context() as patch:
            patch.setattr(links, "_pushes", links._pushes[:1])  # rank 1 hears of no step any more
            plan = scheduler.schedule()
            ranks.executor.forward(plan)
            ranks.executor.sample()
        assert "rank 1 has been awaited by its tensor group" in str(failures.get(timeout=60))
