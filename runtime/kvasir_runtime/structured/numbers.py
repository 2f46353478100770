"""Bounds and values of numbers, so that llguidance's doubles and 64-bit integers hold them and are no wider."""

import math
from typing import Any, Final

LARGEST_EXACT: Final = 2**53
"""Up to here every whole number is a double."""
LARGEST_BOUND: Final = 2**63 - 1024
"""The largest double that is a 64-bit integer."""
LOWER_BOUNDS: Final = ("minimum", "exclusiveMinimum")
BOUNDS: Final = (*LOWER_BOUNDS, "maximum", "exclusiveMaximum")


def bound_within(keyword: str, value: float, *, is_whole: bool) -> tuple[str, float] | None:
    """The same bound, or the next narrower that can be held; None: it cannot. `is_whole`: of whole numbers alone."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    is_lower = keyword in LOWER_BOUNDS
    if is_whole and keyword.startswith("exclusive"):
        keyword = "minimum" if is_lower else "maximum"
        value = math.floor(value) + 1 if is_lower else math.ceil(value) - 1
    if abs(value) > LARGEST_BOUND:
        if (value > 0) == is_lower:
            return None
        return keyword, -LARGEST_BOUND if is_lower else LARGEST_BOUND
    if isinstance(value, int) and abs(value) > LARGEST_EXACT:
        nearest = float(value)
        if nearest < value and is_lower:
            nearest = math.nextafter(nearest, math.inf)
        if nearest > value and not is_lower:
            nearest = math.nextafter(nearest, -math.inf)
        value = int(nearest)
    return keyword, value


def exact_value(value: Any) -> Any:
    """A constant without a zero below zero. Raises ValueError for whole numbers that are not held exactly."""
    match value:
        case bool():
            return value
        case list():
            return [exact_value(each) for each in value]
        case dict():
            return {name: exact_value(each) for name, each in value.items()}
        case int() if abs(value) > LARGEST_EXACT:
            raise ValueError(f"the number {value}, and whole numbers are exact up to 2^53")
        case float() if value == 0:
            return 0
    return value
