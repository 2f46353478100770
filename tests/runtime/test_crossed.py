"""Few combinations hold every pair of values."""

import itertools

import pytest
from tests.runtime.crossed import covering, crossed


def test_every_pair_of_values_is_in_a_quick_combination() -> None:
    sizes = (4, 3, 2, 2)
    rows = list(itertools.product(*map(range, sizes)))
    quick = covering(rows)
    for (first, of_first), (second, of_second) in itertools.combinations(enumerate(map(range, sizes)), 2):
        met = {(row[first], row[second]) for row in quick}
        assert met == set(itertools.product(of_first, of_second))
    assert len(quick) <= 14 < len(rows)


def test_other_combinations_are_slow_and_none_is_lost() -> None:
    combinations = crossed("ab", [pytest.param(1, 2, id="few"), pytest.param(3, 4, id="many")], [True, False])
    expected = {(letter, *numbers, last) for letter in "ab" for numbers in ((1, 2), (3, 4)) for last in (True, False)}
    assert {one.values for one in combinations} == expected
    assert [one.marks for one in combinations if one.marks] == [[pytest.mark.slow]] * 4
