"""What to do about children that are not as we applied them: the plan's drift, weighed with what is known of others.

Three causes look alike in a plan. A person's edit is undone. What admission changes on the way in is learned
and not fought. What another controller writes back each time is put back ever more seldom, and the status names it: one
edit is undone at once, each further one that follows soon waits longer.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.apply.drift import as_stored, find_drift
from kvasir_operator.apply.plan import APPLIED_HASH, Apply, Cause, Plan
from kvasir_operator.errors import OBJECT_ERRORS
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import KubeObject, object_key
from kvasir_operator.queue.back_off import BackOff

logger = logging.getLogger(__name__)

_BACK_OFF = BackOff(first_seconds=1.0, longest_seconds=300.0)
_QUIET_SECONDS = 60.0
"""Who has not written again for this long after the back-off has given up."""
_NUM_EDITS = 3
"""As many in a row are no longer a person's slips."""


class LearnedMutations:
    """What admission makes of one service's children, by UID.

    A child that differs from what we applied, right after we applied it, was changed on its way in. What the API server
    stores of it is remembered for as long as we want the same of it; a child that is like that is as it should be.
    After a restart a dry run shows the same without a write.
    """

    def __init__(self) -> None:
        self._learned: dict[str, tuple[str, str | None]] = {}
        """By UID: the hash of what we want, and that as the API server stores it, as JSON; None: unchanged."""

    def learn(self, uid: str, desired: KubeObject, stored: KubeObject) -> None:
        """`stored` is the API server's answer to an apply, or a dry run, of `desired`."""
        is_changed = bool(find_drift(desired, stored))
        expected = json.dumps(as_stored(desired, stored)) if is_changed else None
        self._learned[uid] = _hash(desired), expected

    def keep(self, uids: Collection[str]) -> None:
        """Forgets children that are gone: each revision has children of its own."""
        self._learned = {uid: learned for uid, learned in self._learned.items() if uid in uids}

    def expected(self, uid: str, desired: KubeObject) -> KubeObject | None:
        """What the child should look like; None where nothing was learned of what we want now."""
        applied_hash, expected = self._learned.get(uid, ("", None))
        if applied_hash != _hash(desired):
            return None
        return desired if expected is None else dict(json.loads(expected))


def _hash(desired: KubeObject) -> str:
    return str(desired["metadata"]["annotations"][APPLIED_HASH])


@dataclass(frozen=True)
class Settled:
    """`plan` without the applies that would change nothing or must wait; `contested` says who writes what back.

    `retry_seconds`: look again then; None where nothing waits.
    """

    plan: Plan
    contested: tuple[str, ...] = ()
    retry_seconds: float | None = None


class ForeignWrites:
    """Of one service. Kept between passes: what is lost with the process is learned again without a write."""

    def __init__(self, client: KubeClient, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._client = client
        self._clock = clock
        self._mutations = LearnedMutations()
        self._contests: dict[str, FieldConflict] = {}

    async def settle(self, plan: Plan, children: Iterable[KubeObject]) -> Settled:
        """`children` as they were observed. Raises KubeUnavailableError when the API server does not answer."""
        now, live = self._clock(), {object_key(child): child for child in children}
        uids = {child["metadata"]["uid"] for child in live.values()}
        self._mutations.keep(uids)
        self._contests = {uid: conflict for uid, conflict in self._contests.items() if now < conflict.over_at}
        applies = []
        for action in plan.applies:
            is_drift = action.cause is Cause.DRIFTED and action.key in live
            settled = await self._settle_drift(action, live[action.key], now) if is_drift else action
            if settled is not None:
                applies.append(settled)
        reported = [conflict for conflict in self._contests.values() if conflict.is_reported]
        return Settled(
            replace(plan, applies=tuple(applies)),
            tuple(conflict.message for conflict in reported),
            min((conflict.look_at(now) - now for conflict in self._contests.values()), default=None),
        )

    def remember(self, plan: Plan, written: Collection[KubeObject]) -> None:
        """What the API server answered to the plan's applies."""
        desired = {action.key: action.obj for action in plan.applies}
        for stored in written:
            if (key := object_key(stored)) in desired:
                self._mutations.learn(stored["metadata"]["uid"], desired[key], stored)

    async def _settle_drift(self, action: Apply, live: KubeObject, now: float) -> Apply | None:
        uid = live["metadata"]["uid"]
        conflict = self._contests.get(uid)
        if conflict is not None and now < conflict.next_write:
            return None
        drift = find_drift(await self._expected(uid, action.obj), live)
        if not drift:
            return None
        self._contests[uid] = continued(conflict, await self._message(action, drift), now)
        return replace(action, drift=tuple(drift))

    async def _expected(self, uid: str, desired: KubeObject) -> KubeObject:
        expected = self._mutations.expected(uid, desired)
        if expected is not None:
            return expected
        try:
            stored = await self._client.dry_run(desired)
        except OBJECT_ERRORS as error:
            # Refused, or a webhook that allows no dry run: the real apply will show.
            logger.info("%s: dry run: %s", object_key(desired), error)
            return desired
        self._mutations.learn(uid, desired, stored)
        return self._mutations.expected(uid, desired) or desired

    async def _message(self, action: Apply, drift: Collection[str]) -> str:
        """Who it is only the API server knows: the cache keeps no managedFields."""
        namespace = action.obj["metadata"]["namespace"]
        live = await self._client.get(action.key.kind, namespace, action.key.name) or action.obj
        return f"{action.key}: {conflict_message(live, [*drift])}"


@dataclass(frozen=True)
class FieldConflict:
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


def continued(conflict: FieldConflict | None, message: str, now: float) -> FieldConflict:
    """After one more edit, which is being undone now."""
    num_edits = 1 if conflict is None or now >= conflict.over_at else conflict.num_edits + 1
    return FieldConflict(num_edits, now + _BACK_OFF.delay_seconds(num_edits), message)


def conflict_message(live: KubeObject, paths: Sequence[str]) -> str:
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
