"""Where ranks run: the one of an engine in the core's process, several as processes of their own, perhaps elsewhere."""

import pytest

from kvasir_runtime.config import ParallelConfig
from kvasir_runtime.ranks.start import topology_of


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelConfig(), True),
        (ParallelConfig(data_parallel_size=2), True),
        (ParallelConfig(tensor_parallel_size=2), False),
        (ParallelConfig(data_parallel_size=2, nnodes=2), False),
    ],
)
def test_a_rank_is_in_the_cores_process_only_where_it_is_surely_the_only_one(
    parallel: ParallelConfig, expected: bool
) -> None:
    assert topology_of(parallel, 1).runs_in_core == expected
