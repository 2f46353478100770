"""Each of kvasir's rows beside the cheapest other rule, and the oracle, that keep the SLO as often or more often.

    python -m benchmarks.autoscaling.compare FILE...

Reads the tables of `python -m benchmarks.autoscaling`; of equal rows those of the last file count. Between neighbouring
thresholds of a rule, replica-hours are taken to go linearly with attainment.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.autoscaling.oracle import ORACLE

OURS = "kvasir"
_HEADING = re.compile(r"^(?:## )?([\w-]+)[:,] \d+ requests$")
_ROW = re.compile(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|")


@dataclass(frozen=True)
class Row:
    """`attainment`: per cent of the requests."""

    trace: str
    rule: str
    threshold: float
    attainment: float
    replica_hours: float

    def __str__(self) -> str:
        return f"{self.threshold:.3g}: {self.attainment:.1f} %, {self.replica_hours:.2f}"


def rows_of(text: str) -> Iterable[Row]:
    trace = ""
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            trace = heading[1]
        elif trace and (row := _ROW.match(line)):
            yield Row(trace, row[1], *map(float, row.groups()[1:]))


def cheapest_other(ours: Row, rows: Iterable[Row]) -> Row | None:
    """None where no other keeps the SLO as often."""
    return _cheapest(ours, [row for row in rows if row.rule not in (OURS, ORACLE)])


def cheapest_oracle(ours: Row, rows: Iterable[Row]) -> Row | None:
    return _cheapest(ours, [row for row in rows if row.rule == ORACLE])


def _cheapest(ours: Row, rows: Iterable[Row]) -> Row | None:
    rows = sorted((row for row in rows if row.trace == ours.trace), key=lambda row: (row.rule, row.threshold))
    as_often = [row for row in rows if row.attainment >= ours.attainment]
    between = [
        _between(low, high, ours.attainment)
        for pair in pairwise(rows)
        for low, high in [sorted(pair, key=lambda row: row.attainment)]
        if low.rule == high.rule and low.attainment < ours.attainment < high.attainment
    ]
    return min(as_often + between, key=lambda row: row.replica_hours, default=None)


def _between(low: Row, high: Row, attainment: float) -> Row:
    share = (attainment - low.attainment) / (high.attainment - low.attainment)
    threshold = low.threshold + share * (high.threshold - low.threshold)
    replica_hours = low.replica_hours + share * (high.replica_hours - low.replica_hours)
    return Row(low.trace, low.rule, threshold, attainment, replica_hours)


def compared(rows: Sequence[Row]) -> Iterable[str]:
    """Lines of a table."""
    yield "| trace | kvasir: threshold, in SLO, replica-hours | cheapest other | replica-hours | oracle |"
    yield "|---|---|---|---|---|"
    for ours in (row for row in rows if row.rule == OURS):
        other, oracle = cheapest_other(ours, rows), cheapest_oracle(ours, rows)
        if other is None:
            beside = "none | "
        else:
            saving = 100 * (ours.replica_hours / other.replica_hours - 1)
            beside = f"{other.rule} {other} | {saving:+.0f} % "
        least = "" if oracle is None else f" {oracle.replica_hours:.2f}"
        yield f"| {ours.trace} | {ours} | {beside}|{least} |"


def main(files: Sequence[str]) -> None:
    rows = {(row.trace, row.rule, row.threshold): row for file in files for row in rows_of(Path(file).read_text())}
    print(*compared(list(rows.values())), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
