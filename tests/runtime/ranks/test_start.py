"""Where ranks run: the one of an engine in the core's process, several as processes of their own, perhaps elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvasir_runtime.config import ModelConfig, ParallelConfig, RuntimeConfig
from kvasir_runtime.ranks import start


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of what starts the ranks, in place of them."""
    for name in ("one_rank", "several_ranks"):

        @contextmanager
        def says(*_: Any, name: str = name) -> Iterator[str]:
            yield name

        monkeypatch.setattr(start, name, says)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelConfig(), "one_rank"),
        (ParallelConfig(data_parallel_size=2), "one_rank"),
        (ParallelConfig(tensor_parallel_size=2), "several_ranks"),
        (ParallelConfig(data_parallel_size=2, nnodes=2), "several_ranks"),
    ],
)
def test_a_rank_is_in_the_cores_process_only_where_it_is_surely_the_only_one(
    parallel: ParallelConfig, expected: str, tmp_path: Path
) -> None:
    config = RuntimeConfig(model=ModelConfig(model="m"), parallel=parallel)
    with start.running_ranks_of(config, tmp_path, 1, lambda failure: None) as found:
        assert found == expected
