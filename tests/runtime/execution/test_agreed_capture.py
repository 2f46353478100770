"""Ranks capture a graph together, or none of them does."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvasir_runtime.execution.captures import AgreedCapture
from kvasir_runtime.execution.graphs import CaptureError, GraphShape

SHAPE = GraphShape(4, 1)


@dataclass
class Captured:
    memory_bytes: int

    def replay(self, inputs: Any) -> Any:
        return inputs


def failing(shape: GraphShape) -> Any:
    raise CaptureError("out of memory")


def test_every_rank_counts_the_most_memory_of_any() -> None:
    agreed = AgreedCapture(lambda shape: Captured(100), least=lambda value: min(value, 1 if value > 0 else -130))
    step = agreed(SHAPE)
    assert step.memory_bytes == 130
    assert step.replay("inputs") == "inputs"  # type: ignore[arg-type]


def test_a_rank_gives_up_a_graph_that_another_could_not_capture() -> None:
    with pytest.raises(CaptureError, match="another rank"):
        AgreedCapture(lambda shape: Captured(100), least=lambda value: 0)(SHAPE)


def test_a_rank_that_could_not_capture_tells_the_others_and_says_why() -> None:
    told: list[int] = []
    with pytest.raises(CaptureError, match="out of memory"):
        AgreedCapture(failing, least=lambda value: told.append(value) or value)(SHAPE)
    assert told == [0]
