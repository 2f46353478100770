"""How often ranks spoke to each other, and how much they said. No torch: whoever shows the numbers has none."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from kvasir_runtime.shared_rows import SharedRows

Operation = Literal["all_reduce", "all_gather", "broadcast", "send", "receive"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "broadcast", "send", "receive")
Group = Literal["tensor", "pipeline"]
GROUPS: tuple[Group, ...] = ("tensor", "pipeline")


def _zeros() -> list[int]:
    return [0] * len(OPERATIONS)


@dataclass(slots=True)
class CollectiveCounts:
    """Of one rank in one group: calls, and bytes that it handed in, by the operation's place in OPERATIONS."""

    calls: list[int] = field(default_factory=_zeros)
    num_bytes: list[int] = field(default_factory=_zeros)

    def count(self, operation: Operation, num_bytes: int) -> None:
        index = OPERATIONS.index(operation)
        self.calls[index] += 1
        self.num_bytes[index] += num_bytes

    def copy(self) -> "CollectiveCounts":
        return CollectiveCounts(list(self.calls), list(self.num_bytes))

    def add(self, other: "CollectiveCounts") -> None:
        for index in range(len(OPERATIONS)):
            self.calls[index] += other.calls[index]
            self.num_bytes[index] += other.num_bytes[index]

    def since(self, earlier: "CollectiveCounts") -> "CollectiveCounts | None":
        """None: nothing."""
        if self == earlier:
            return None
        return CollectiveCounts(
            [now - then for now, then in zip(self.calls, earlier.calls, strict=True)],
            [now - then for now, then in zip(self.num_bytes, earlier.num_bytes, strict=True)],
        )


CountsByGroup = dict[Group, CollectiveCounts]


class CollectiveTotal(NamedTuple):
    group: Group
    operation: Operation
    calls: float
    num_bytes: float


class CollectiveTotals:
    """Of all ranks of all engines, in rows that processes share: one a data-parallel engine, written by its core."""

    def __init__(self, ipc_dir: Path, num_engines: int) -> None:
        self._rows = SharedRows(ipc_dir / "collectives", num_engines, 2 * len(GROUPS) * len(OPERATIONS))

    def write(self, engine: int, ranks: Iterable[CountsByGroup]) -> None:
        totals = {group: CollectiveCounts() for group in GROUPS}
        for counts in ranks:
            for group, of in counts.items():
                totals[group].add(of)
        row = self._rows.row(engine)
        for index, group in enumerate(GROUPS):
            for place, number in enumerate((*totals[group].calls, *totals[group].num_bytes)):
                row[2 * len(OPERATIONS) * index + place] = number

    def read(self) -> Iterator[CollectiveTotal]:
        """Those that were ever called."""
        for index, group in enumerate(GROUPS):
            first = 2 * len(OPERATIONS) * index
            for place, operation in enumerate(OPERATIONS):
                if calls := self._rows.total(first + place):
                    num_bytes = self._rows.total(first + len(OPERATIONS) + place)
                    yield CollectiveTotal(group, operation, calls, num_bytes)
