"""Durations and quantities as Kubernetes users write them (`300s`, `10m`, `8Gi`, `500m`).

Both keep the text that was written, so that what goes into a child object is what the user typed.
"""

import re
from dataclasses import dataclass
from typing import Final

DURATION_PATTERN: Final = r"^([0-9]+(ms|s|m|h))+$"
QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_FACTORS = {"": 1.0, "m": 0.001} | {
    prefix + suffix: float(base**power)
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kMGTP" if base == 1000 else "KMGTP", start=1)
}


@dataclass(frozen=True)
class Duration:
    """A span of time; `text` is what the manifest says."""

    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(DURATION_PATTERN, self.text):
            raise ValueError(f"{self.text!r} is not a duration: expected numbers with units, such as 500ms, 30s or 10m")

    @property
    def seconds(self) -> float:
        parts = re.findall(r"([0-9]+)(ms|s|m|h)", self.text)
        return sum(int(number) * _SECONDS[unit] for number, unit in parts)


@dataclass(frozen=True)
class Quantity:
    """An amount of a resource; `text` is what the manifest says."""

    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(QUANTITY_PATTERN, self.text):
            raise ValueError(f"{self.text!r} is not a quantity: expected a number with a unit, such as 500m, 8 or 64Gi")

    @property
    def amount(self) -> float:
        """In whole units: bytes of memory, cores of CPU."""
        number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", self.text).groups()  # type: ignore[union-attr]
        return float(number) * _FACTORS[unit]
