"""What to do about children that are not as we applied them: the plan's drift, weighed with what is known of others.

Three causes look alike in a plan. A person's edit is undone. What admission changes on the way in is learned
and not fought. What another controller writes back each time is put back ever more seldom, and reported (contest.py).
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from kvasir_operator.apply.contest import Contest, contest_message, continued
from kvasir_operator.apply.drift import as_stored, find_drift
from kvasir_operator.apply.plan import APPLIED_HASH, Apply, Cause, Plan
from kvasir_operator.errors import OBJECT_ERRORS
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import KubeObject, object_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Learned:
    applied_hash: str
    expected: str | None
    """JSON text: what we want, as the API server stores it; None where it changes nothing of that."""


class LearnedMutations:
    """What admission makes of one service's children, by UID.

    A child that differs from what we applied, right after we applied it, was changed on its way in. What the API server
    stores of it is remembered for as long as we want the same of it; a child that is like that is as it should be.
    After a restart a dry run shows the same without a write.
    """

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
        self._contests: dict[str, Contest] = {}

    async def settle(self, plan: Plan, children: Iterable[KubeObject]) -> Settled:
        """`children` as they were observed. Raises KubeUnavailableError when the API server does not answer."""
        now, live = self._clock(), {object_key(child): child for child in children}
        uids = {child["metadata"]["uid"] for child in live.values()}
        self._mutations.keep(uids)
        self._contests = {uid: contest for uid, contest in self._contests.items() if now < contest.over_at}
        applies = []
        for action in plan.applies:
            is_drift = action.cause is Cause.DRIFTED and action.key in live
            settled = await self._settle_drift(action, live[action.key], now) if is_drift else action
            if settled is not None:
                applies.append(settled)
        reported = [contest for contest in self._contests.values() if contest.is_reported]
        return Settled(
            replace(plan, applies=tuple(applies)),
            tuple(contest.message for contest in reported),
            min((contest.look_at(now) - now for contest in self._contests.values()), default=None),
        )

    def remember(self, plan: Plan, written: Collection[KubeObject]) -> None:
        """What the API server answered to the plan's applies."""
        desired = {action.key: action.obj for action in plan.applies}
        for stored in written:
            if (key := object_key(stored)) in desired:
                self._mutations.learn(stored["metadata"]["uid"], desired[key], stored)

    async def _settle_drift(self, action: Apply, live: KubeObject, now: float) -> Apply | None:
        uid = live["metadata"]["uid"]
        contest = self._contests.get(uid)
        if contest is not None and now < contest.next_write:
            return None
        drift = find_drift(await self._expected(uid, action.obj), live)
        if not drift:
            return None
        self._contests[uid] = continued(contest, await self._message(action, drift), now)
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
        return f"{action.key}: {contest_message(live, [*drift])}"
