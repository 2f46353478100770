"""What a group has been through, kept as an annotation on its object, so that it outlives the operator.

It is written before pods are deleted: a pass that ends in between is completed by the next, which finds pods that it
names.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Self

from kvasir_operator.api.labels import GROUP
from kvasir_operator.kube.kinds import KubeObject, annotation_of, seconds_between

RESTARTS: Final = f"{GROUP}/group-restarts"
FORGET_SECONDS: Final = 3600.0
"""After so long without a failure the next is the first again."""
_FAILURES_TO_AVOID: Final = 2
_MAX_NODES: Final = 16


@dataclass(frozen=True)
class RestartRecord:
    """Restarts after failures, none of them an hour after the one before.

    last: when the group was last restarted (RFC 3339). cause: what had failed. nodes: how often a failure began there.
    pods: uids of those that the last restart was to delete.
    """

    num_restarts: int = 0
    last: str | None = None
    cause: str = ""
    nodes: Mapping[str, int] = field(default_factory=dict)
    pods: frozenset[str] = frozenset()

    @classmethod
    def of(cls, obj: KubeObject) -> Self:
        """Empty where there is none, or one that somebody has edited beyond recognition."""
        text = annotation_of(obj, RESTARTS)
        try:
            return cls() if text is None else cls._read(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    @classmethod
    def _read(cls, fields: Mapping[str, Any]) -> Self:
        datetime.fromisoformat(fields["last"])
        nodes = {str(name): int(number) for name, number in fields["nodes"].items()}
        pods = frozenset(map(str, fields.get("pods", ())))
        return cls(int(fields["restarts"]), str(fields["last"]), str(fields["cause"]), nodes, pods)

    def text(self) -> str:
        """As the annotation holds it."""
        restarts = {"restarts": self.num_restarts, "last": self.last, "cause": self.cause}
        return json.dumps({**restarts, "nodes": dict(self.nodes), "pods": sorted(self.pods)}, sort_keys=True)

    def current(self, now: str) -> "RestartRecord":
        """Itself while it counts, else an empty one."""
        is_past = self.last is None or seconds_between(self.last, now) >= FORGET_SECONDS
        return RestartRecord() if is_past else self

    def restarted(self, now: str, cause: str, node: str | None, pods: Iterable[str] = ()) -> "RestartRecord":
        """After one more restart. `node`: where the failure began, where that is known. `pods`: uids of those to go."""
        nodes = dict(self.nodes)
        if node is not None and (node in nodes or len(nodes) < _MAX_NODES):
            nodes[node] = nodes.get(node, 0) + 1
        return RestartRecord(self.num_restarts + 1, now, cause, nodes, frozenset(pods))

    @property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Where failures began more than once."""
        return tuple(sorted(name for name, number in self.nodes.items() if number >= _FAILURES_TO_AVOID))
