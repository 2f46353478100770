"""Fields that somebody else keeps writing back: they are put back ever more seldom, and the status names who it is.

One edit is undone at once. Each further one that follows soon waits longer, so two controllers that want different
things cost a write each few minutes, not a thousand.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.queue.back_off import BackOff

_BACK_OFF = BackOff(first_seconds=1.0, longest_seconds=300.0)
_QUIET_SECONDS = 60.0
"""Who has not written again for this long after the back-off has given up."""
_NUM_EDITS = 3
"""As many in a row are no longer a person's slips."""


@dataclass(frozen=True)
class Contest:
    """Edits of one child in a row. Times are seconds of one monotonic clock."""

    num_edits: int
    next_write: float
    message: str

    @property
    def over_at(self) -> float:
        return self.next_write + _QUIET_SECONDS

    def look_at(self, now: float) -> float:
        """When the next pass is needed: to write again, or to find that it is over."""
        return self.next_write if now < self.next_write else self.over_at

    @property
    def is_reported(self) -> bool:
        return self.num_edits >= _NUM_EDITS


def continued(contest: Contest | None, message: str, now: float) -> Contest:
    """After one more edit, which is being undone now."""
    num_edits = 1 if contest is None or now >= contest.over_at else contest.num_edits + 1
    return Contest(num_edits, now + _BACK_OFF.delay_seconds(num_edits), message)


def contest_message(live: KubeObject, paths: Sequence[str]) -> str:
    """`live` with its managedFields, without which nobody can be named."""
    managers = sorted({manager for path in paths for manager in writers_of(live, path)})
    who, what = ", ".join(managers) or "somebody", ", ".join(paths)
    return (
        f"{who} keeps writing {what}: it was put back several times, and is now put back ever more seldom; "
        "make the other one leave it alone, or say what you want in the manifest"
    )


def writers_of(live: KubeObject, path: str) -> list[str]:
    """Field managers but ours that own the field at a path (as apply/drift.py writes it), or one above or below it."""
    entries = live["metadata"].get("managedFields", [])
    return [
        each["manager"]
        for each in entries
        if each.get("manager") != FIELD_MANAGER and _owns(each.get("fieldsV1", {}), path.split("."))
    ]


def _owns(fields: Mapping[str, Any], segments: Sequence[str]) -> bool:
    """Whether the tree of `f:NAME` and `k:{KEY}` in managedFields reaches as far as the path does, or ends on it."""
    for segment in segments:
        name, _, element = segment.rstrip("]").partition("[")
        if f"f:{name}" not in fields:
            return False
        fields = fields[f"f:{name}"]
        keys = [key for key in fields if key.startswith("k:")]
        if not keys:
            if not fields:
                return True  # owned as a whole
            continue
        found = [key for key in keys if _label(key) == element]
        if not found:
            return False
        fields = fields[found[0]]
    return True


def _label(key: str) -> str:
    values: Iterable[Any] = json.loads(key.removeprefix("k:")).values()
    return ",".join(str(value) for value in values)
