"""Whoever waits for a rank to load reads in its log which layers it takes, and how many it has."""

import itertools
import logging
from collections.abc import Iterable

import pytest

from kvasir_runtime.execution.startup import LoadingProgress


def said(caplog: pytest.LogCaptureFixture, times: Iterable[float]) -> list[str]:
    """Rank 1 loads layers 4 to 7; `times` are the clock's, one a reading."""
    clock = iter(times)
    with caplog.at_level(logging.INFO):
        assert list(LoadingProgress("rank 1", 2, 8, lambda: next(clock)).over(range(4, 8))) == [4, 5, 6, 7]
    return caplog.messages


def test_a_short_load_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, itertools.repeat(0.0)) == ["rank 1 of 2 loads layers 4 to 7 of 8"]


def test_a_long_one_tells_every_five_seconds_how_many_layers_it_has(caplog: pytest.LogCaptureFixture) -> None:
    times = [0.0, 0.0, 4.9, 5.0, 10.0]  # at first, and before each layer
    assert said(caplog, times)[1:] == ["rank 1: 2 of 4 layers loaded", "rank 1: 3 of 4 layers loaded"]
