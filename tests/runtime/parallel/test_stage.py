"""How layers are shared out among pipeline stages."""

import pytest

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.parallel.stage import WHOLE, Stage


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        (8, [2, 2, 2, 2]),
        (9, [2, 2, 3, 2]),
        (10, [2, 3, 3, 2]),
        (11, [3, 3, 3, 2]),
        (4, [1, 1, 1, 1]),
        (3, [2, 1]),
        (80, [80]),
    ],
)
def test_the_last_stage_never_has_more_layers_than_another(num_layers: int, sizes: list[int]) -> None:
    runs = [Stage(index, len(sizes)).layers(num_layers) for index in range(len(sizes))]
    assert [len(run) for run in runs] == sizes
    assert [layer for run in runs for layer in run] == list(range(num_layers))


def test_a_stage_without_a_layer_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--pipeline-parallel-size is 5, but the model has 4 layers.*at most 4"
    ):
        Stage(0, 5).layers(4)


@pytest.mark.parametrize("partition", [(3, 5), (1, 6, 1), (8,)])
def test_stages_have_as_many_layers_as_is_written(partition: tuple[int, ...]) -> None:
    runs = [Stage(index, len(partition), partition).layers(8) for index in range(len(partition))]
    assert tuple(len(run) for run in runs) == partition
    assert [layer for run in runs for layer in run] == list(range(8))


@pytest.mark.parametrize("num_layers", [7, 9])
def test_a_partition_of_another_model_is_refused(num_layers: int) -> None:
    with pytest.raises(ConfigurationError, match=f"is 3,5, which is 8 layers, but the model has {num_layers}: "):
        Stage(0, 2, (3, 5)).layers(num_layers)


def test_ends() -> None:
    assert [(stage.is_first, stage.is_last) for stage in (WHOLE, Stage(0, 3), Stage(1, 3), Stage(2, 3))] == [
        (True, True),
        (True, False),
        (False, False),
        (False, True),
    ]
