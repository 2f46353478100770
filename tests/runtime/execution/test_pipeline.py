"""What pipeline stages tell each other when they are loaded."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.runtime.parallel.queue_link import queue_links

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.pipeline import Pipeline, join_pipeline
from kvasir_runtime.parallel.stage import Stage

Partition = tuple[int, ...] | None


def joined(*told: Partition) -> list[Pipeline]:
    """Stages whose nodes were told these partitions."""
    links = queue_links(len(told))
    with ThreadPoolExecutor(len(told)) as threads:
        stages = [
            threads.submit(join_pipeline, Stage(index, len(told), partition), links[index], (), ())
            for index, partition in enumerate(told)
        ]
        return [stage.result() for stage in stages]


@pytest.mark.parametrize("partition", [None, (1, 2)])
def test_stages_that_were_told_the_same_make_up_a_model(partition: Partition) -> None:
    assert [len(pipeline.facts) for pipeline in joined(partition, partition)] == [2, 2]


@pytest.mark.parametrize(
    ("told", "message"), [(((1, 2), (2, 1)), "stage 0: 1,2; stage 1: 2,1"), (((1, 2), None), "0: 1,2; stage 1: none")]
)
def test_stages_that_were_told_otherwise_do_not(told: tuple[Partition, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        joined(*told)
