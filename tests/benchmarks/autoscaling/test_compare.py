"""The comparison of the autoscaling benchmark's tables."""

from benchmarks.autoscaling.compare import Row, cheapest_oracle, cheapest_other, compared, rows_of

TABLES = """
ramp: 10 requests

| rule | threshold | in SLO, % | replica-hours | most | changes | turns | wasted hours |
|---|---|---|---|---|---|---|---|
| kvasir | 0.75 | 95.0 | 4.00 | 6 | 6 | 1 | 0.00 |
| hpa-kv-usage | 0.25 | 95.0 | 8.00 | 6 | 6 | 1 | 0.00 |
| hpa-kv-usage | 0.4 | 94.9 | 1.00 | 6 | 6 | 1 | 0.00 |
| wva-saturation | 0.3 | 99.0 | 5.00 | 6 | 6 | 1 | 0.00 |

## step, 20 requests

| kvasir | 1 | 99.9 | 2.00 | 6 | 6 | 1 | 0.00 |
| wva-saturation | 0.3 | 99.0 | 5.00 | 6 | 6 | 1 | 0.00 |
"""
ROWS = list(rows_of(TABLES))


def test_rows_belong_to_the_trace_above_them() -> None:
    assert ROWS[0] == Row("ramp", "kvasir", 0.75, 95.0, 4.0)
    assert [row.trace for row in ROWS] == ["ramp"] * 4 + ["step"] * 2


def test_the_cheapest_counts_of_those_that_keep_the_slo_as_often() -> None:
    assert cheapest_other(ROWS[0], ROWS) == ROWS[3]
    assert cheapest_other(ROWS[4], ROWS) is None


def test_between_neighbouring_thresholds_hours_go_with_attainment() -> None:
    others = [Row("ramp", "hpa", 0.25, 98.0, 8.0), Row("ramp", "hpa", 0.5, 90.0, 4.0), Row("ramp", "hpa", 1, 10.0, 1.0)]
    assert cheapest_other(Row("ramp", "kvasir", 1, 94.0, 1.0), others) == Row("ramp", "hpa", 0.375, 94.0, 6.0)
    assert cheapest_other(Row("ramp", "kvasir", 1, 90.0, 1.0), others) == others[1]
    assert cheapest_other(Row("ramp", "kvasir", 1, 98.0, 1.0), others) == others[0]
    assert cheapest_other(Row("ramp", "kvasir", 1, 98.1, 1.0), others) is None


def test_nothing_is_between_different_rules_or_traces() -> None:
    others = [
        Row("ramp", "hpa", 0.2, 98.0, 8.0),
        Row("ramp", "wva", 0.4, 90.0, 4.0),
        Row("step", "hpa", 0.4, 90.0, 1.0),
    ]
    assert cheapest_other(Row("ramp", "kvasir", 1, 94.0, 1.0), others) == others[0]


def test_the_difference_is_in_per_cent_of_the_others_hours() -> None:
    assert list(compared(ROWS))[2:] == [
        "| ramp | 0.75: 95.0 %, 4.00 | wva-saturation 0.3: 99.0 %, 5.00 | -20 % | |",
        "| step | 1: 99.9 %, 2.00 | none | | |",
    ]


def test_the_oracle_stands_beside_the_others_and_is_none_of_them() -> None:
    oracle = Row("ramp", "oracle", 2, 96.0, 3.0)
    assert cheapest_other(ROWS[0], [*ROWS, oracle]) == ROWS[3]
    assert cheapest_oracle(ROWS[0], [*ROWS, oracle]) == oracle
    assert list(compared([*ROWS, oracle]))[2].endswith("| -20 % | 3.00 |")
