"""Numbers that an engine's processes share in memory: a row a process, written by its owner alone and read by all."""

import mmap
import os
from pathlib import Path

SLOT_BYTES = 8


class SharedRows:
    """Rows of float64, mapped from one file; whoever comes first makes it. New slots are zero."""

    def __init__(self, file: Path, num_rows: int, num_slots: int) -> None:
        self._num_rows = num_rows
        self._num_slots = num_slots
        num_bytes = num_rows * num_slots * SLOT_BYTES
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)  # the same size from everyone
            self._slots = memoryview(mmap.mmap(descriptor, num_bytes)).cast("d")
        finally:
            os.close(descriptor)

    def row(self, index: int) -> "memoryview[float]":
        return self._slots[index * self._num_slots : (index + 1) * self._num_slots]

    def column(self, slot: int) -> "memoryview[float]":
        """Of all rows, as it is whenever it is looked at."""
        return self._slots[slot :: self._num_slots]

    def total(self, slot: int) -> float:
        return float(sum(self.column(slot)))
