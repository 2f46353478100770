"""Durations and quantities as Kubernetes users write them (`300s`, `10m`, `8Gi`, `500m`)."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

DURATION_PATTERN: Final = r"^([0-9]{1,7}(ms|s|m|h))+$"
QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# Largest first.
_DECIMAL_FACTORS = {unit: Fraction(1000) ** power for unit, power in zip("PTGMk", range(5, 0, -1), strict=True)}
_DECIMAL_FACTORS |= {"": Fraction(1), "m": Fraction(1, 1000)}
_BINARY_FACTORS = {f"{unit}i": Fraction(1024) ** power for unit, power in zip("PTGMK", range(5, 0, -1), strict=True)}
_BINARY_FACTORS |= {"": Fraction(1)}
_FACTORS = _DECIMAL_FACTORS | _BINARY_FACTORS


@dataclass(frozen=True)
class Duration:
    """A span of time; `text` is what the manifest says."""

    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(DURATION_PATTERN, self.text):
            raise ValueError(
                f"{self.text!r} is not a duration: expected up to 7 digits and a unit, such as 500ms, 30s or 10m"
            )

    @property
    def seconds(self) -> float:
        parts = re.findall(r"([0-9]+)(ms|s|m|h)", self.text)
        return sum(int(number) * _SECONDS[unit] for number, unit in parts)


@dataclass(frozen=True)
class Quantity:
    """An amount of a resource. `text` is as the API server stores it, whatever the manifest's spelling: a child and its
    revision then differ only where an amount does.

    A whole number of the largest unit of its kind: 1024Mi is 1Gi, 1000m is 1 and 0.5 is 500m, but 1G stays what it is.
    What no unit counts stays as it is too.
    """

    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(QUANTITY_PATTERN, self.text):
            raise ValueError(f"{self.text!r} is not a quantity: expected a number with a unit, such as 500m, 8 or 64Gi")
        object.__setattr__(self, "text", self._canonical_text())

    @property
    def amount(self) -> float:
        """In whole units: bytes of memory, cores of CPU."""
        return float(self._exact)

    def _canonical_text(self) -> str:
        exact = self._exact
        if exact == 0:
            return "0"
        factors = _BINARY_FACTORS if self.text.endswith("i") and exact >= 1024 else _DECIMAL_FACTORS
        whole = (f"{exact // factor}{unit}" for unit, factor in factors.items() if exact % factor == 0)
        return next(whole, self.text)

    @property
    def _exact(self) -> Fraction:
        number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", self.text).groups()  # type: ignore[union-attr]
        return Fraction(number) * _FACTORS[unit]


def at_most(amount: Quantity, limit: Quantity | None) -> Quantity:
    return amount if limit is None or amount.amount <= limit.amount else limit
