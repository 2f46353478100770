"""What admission makes of our children: a mutating policy's changes are learned, not fought.

A child that differs from what we applied, right after we applied it, was changed on its way in. What the API server
stores of it is remembered for as long as we want the same of it; a child that is like that is as it should be. After a
restart a dry run shows the same without a write.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

from kvasir_operator.apply.drift import as_stored, find_drift
from kvasir_operator.apply.plan import APPLIED_HASH
from kvasir_operator.kube.kinds import KubeObject


@dataclass(frozen=True, slots=True)
class _Learned:
    applied_hash: str
    expected: str | None
    """JSON text: what we want, as the API server stores it; None where it changes nothing of that."""


class LearnedMutations:
    """Of one service's children, by UID; in memory alone."""

    def __init__(self) -> None:
        self._learned: dict[str, _Learned] = {}

    def learn(self, uid: str, desired: KubeObject, stored: KubeObject) -> None:
        """`stored` is the API server's answer to an apply, or a dry run, of `desired`."""
        is_changed = bool(find_drift(desired, stored))
        expected = json.dumps(as_stored(desired, stored)) if is_changed else None
        self._learned[uid] = _Learned(_hash(desired), expected)

    def keep(self, uids: Collection[str]) -> None:
        """Forgets children that are gone: each revision has children of its own."""
        self._learned = {uid: learned for uid, learned in self._learned.items() if uid in uids}

    def expected(self, uid: str, desired: KubeObject) -> KubeObject | None:
        """What the child should look like; None where nothing was learned of what we want now."""
        learned = self._learned.get(uid)
        if learned is None or learned.applied_hash != _hash(desired):
            return None
        return desired if learned.expected is None else dict(json.loads(learned.expected))


def _hash(desired: KubeObject) -> str:
    return str(desired["metadata"]["annotations"][APPLIED_HASH])
