"""The same answers whatever else is served: fewer requests of each kind than the script asks."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_no_answer_depends_on_what_else_is_served(benchmark: Callable[[str], Any]) -> None:
    counts = asyncio.run(benchmark("same_answers").measure(10, []))
    assert len(counts) == 9
    assert {what: equal for what, (equal, _) in counts.items()} == dict.fromkeys(counts, 10)
