"""A rule across fields of the manifest: its message, its check in Python, and the same check in CEL."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvasir_operator.api.fields import manifest_fields


@dataclass(frozen=True)
class Rule:
    """`holds` gets the dataclass that the rule belongs to, `cel` has the same value of the manifest as `self`.

    The API server evaluates it once defaults are filled in and, when the CRD is stored, on the group's bare default.
    There `oldSelf` is what an update replaces, empty for a new object; `holds` sees manifests by themselves.
    """

    message: str
    holds: Callable[[Any], bool]
    cel: str


def num_set(value: Any, *names: str) -> int:
    return sum(getattr(value, name) is not None for name in names)


def exactly_one(cls: type, *names: str) -> Rule:
    """Of the optional fields of a group."""
    keys = [f.key for f in manifest_fields(cls) if f.name in names]
    return Rule(
        f"write exactly one of {', '.join(keys[:-1])} and {keys[-1]}",
        lambda value: num_set(value, *names) == 1,
        f"[{', '.join(f'has(self.{key})' for key in keys)}].filter(isSet, isSet).size() == 1",
    )
