"""What a rank says of itself every second."""

from types import SimpleNamespace
from typing import Any, cast

from kvasir_runtime.parallel.counts import CollectiveCounts
from kvasir_runtime.ranks.messages import RankProgress
from kvasir_runtime.ranks.signs_of_life import SignsOfLife


def test_collectives_count_from_the_beginning_of_a_step_to_its_end() -> None:
    sent: list[RankProgress] = []
    tensor, link = (SimpleNamespace(counts=CollectiveCounts([calls], [0])) for calls in (7, 2))
    groups = SimpleNamespace(place=SimpleNamespace(rank=1), tensor=tensor, link=link)
    other: Any = SimpleNamespace(send=sent.append, beat=lambda num_steps: None)
    signs = SignsOfLife(other, cast(Any, groups), other, beat_seconds=3600.0)
    signs.begin_step()
    tensor.counts = CollectiveCounts([10], [0])
    link.counts = CollectiveCounts([3], [0])
    signs.beat()
    signs.end_step()
    signs.beat()
    assert [(progress.num_steps, progress.num_calls) for progress in sent] == [(0, 0), (0, 4), (1, 0)]
    assert sent[1].counts["tensor"].calls == [10]
