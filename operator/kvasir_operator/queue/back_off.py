"""How long to wait after failures in a row."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackOff:
    """Delays after failures in a row: `first_seconds`, doubled each time, at most `longest_seconds`."""

    first_seconds: float = 0.5
    longest_seconds: float = 300.0

    def delay_seconds(self, num_failures: int) -> float:
        doublings = min(num_failures - 1, 32)
        return min(self.first_seconds * 2.0**doublings, self.longest_seconds)
