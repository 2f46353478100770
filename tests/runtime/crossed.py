"""Parameters of tests, crossed: the short suite runs each pair of values, `make test-full` every combination."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

ParameterSet = type(pytest.param())
Row = tuple[int, ...]
"""Of each parameter the index of its value."""


def crossed(*parameters: Sequence[Any]) -> list[Any]:
    """Every combination of the parameters' values, which may be `pytest.param`s with an id. Those are marked slow whose
    pairs of values all come up in others."""
    axes = [[one if isinstance(one, ParameterSet) else pytest.param(one) for one in values] for values in parameters]
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    quick = covering(rows)
    return [_combined([axis[index] for axis, index in zip(axes, row, strict=True)], row in quick) for row in rows]


def covering(rows: Sequence[Row]) -> set[Row]:
    """Few of the rows, in which every two values that meet in one meet. The next is always one with most new pairs."""
    pairs = {row: {*itertools.combinations(enumerate(row), 2)} for row in rows}
    missing = set().union(*pairs.values())
    chosen: set[Row] = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _combined(values: Sequence[Any], is_quick: bool) -> Any:
    marks = [] if is_quick else [pytest.mark.slow]
    ids = [one.id for one in values]
    name = None if None in ids else "-".join(ids)
    return pytest.param(*(value for one in values for value in one.values), marks=marks, id=name)
