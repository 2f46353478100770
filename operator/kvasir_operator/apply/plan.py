"""What to do about a service's children: a pure comparison of desired with observed objects.

A child is written when what we want of it changed since we last applied it (a hash, kept as an annotation on the
child: it also notices fields that are no longer wanted), or when somebody changed a field that we own (drift.py).
Nothing that the service does not own is ever written or deleted, and a Secret is written once: when it is made.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from kvasir_operator.api.labels import GROUP, REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL, TRAFFIC_WEIGHT
from kvasir_operator.apply.drift import find_drift
from kvasir_operator.kube.kinds import (
    CHILD_KINDS,
    INFERENCE_SERVICE,
    SECRET,
    SERVICE,
    WORKLOAD_KINDS,
    KubeObject,
    ObjectKey,
    annotation_of,
    is_terminating,
    kind_of,
    label_of,
    object_key,
)

APPLIED_HASH = f"{GROUP}/applied-hash"


class Cause(StrEnum):
    """Why a child is applied."""

    CREATED = "Created"
    CHANGED = "Changed"
    DRIFTED = "Drifted"


@dataclass(frozen=True)
class Apply:
    """Server-side apply of `obj`; `drift` names the fields that somebody else changed."""

    obj: KubeObject
    cause: Cause
    drift: tuple[str, ...] = ()
    live_uid: str | None = None
    """UID of the child that is there; None where it is created."""

    @property
    def key(self) -> ObjectKey:
        return object_key(self.obj)

    @property
    def workload(self) -> tuple[str | None, str | None]:
        """Role and revision, which a workload's Service has in common with it."""
        return label_of(self.obj, ROLE_LABEL), label_of(self.obj, REVISION_LABEL)


@dataclass(frozen=True)
class Delete:
    """Deletion of a child that is no longer wanted, only while its UID is `uid`.

    revision: whose child it was; None of what all revisions share.
    """

    key: ObjectKey
    uid: str
    revision: str | None = None


@dataclass(frozen=True)
class Edit:
    """A merge patch of a child that is not rendered any more, only while it is as it was seen."""

    key: ObjectKey
    patch: KubeObject

    @classmethod
    def scale(cls, live: KubeObject, replicas: int) -> Self:
        return cls._of(live, spec={"replicas": replicas})

    @classmethod
    def without_weight(cls, live: KubeObject) -> Self:
        """With a Service's weight goes its hash: it is no longer what was applied, and is applied again where its
        revision comes back."""
        annotations = {TRAFFIC_WEIGHT: None, APPLIED_HASH: None}
        return cls._of(live, {"labels": {TRAFFIC_WEIGHT: None}, "annotations": annotations})

    @classmethod
    def adoption(cls, live: KubeObject, owner: KubeObject) -> Self:
        """Of a child that lost its owner, by the `owner` of those that are rendered."""
        return cls._of(live, {"ownerReferences": [owner]})

    @classmethod
    def _of(cls, live: KubeObject, metadata: KubeObject | None = None, **fields: KubeObject) -> Self:
        seen = {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        return cls(object_key(live), {"metadata": {**seen, **(metadata or {})}, **fields})


@dataclass(frozen=True)
class PodDeletion:
    """Of one pod, only while its UID is `uid`.

    grace_seconds: of its own, not its spec's; None leaves that. is_foreground: what it owns goes first.
    """

    name: str
    uid: str
    grace_seconds: int | None = None
    is_foreground: bool = False


@dataclass(frozen=True)
class Restart:
    """All of a group's `pods` are made anew, for `cause`; `annotations` are written on its object before."""

    key: ObjectKey
    uid: str
    pods: tuple[PodDeletion, ...]
    cause: str
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """`blocked` are children whose name somebody else's object has; `terminating` must go before they return."""

    applies: tuple[Apply, ...] = ()
    edits: tuple[Edit, ...] = ()
    restarts: tuple[Restart, ...] = ()
    deletes: tuple[Delete, ...] = ()
    blocked: tuple[ObjectKey, ...] = ()
    terminating: tuple[ObjectKey, ...] = ()

    def without(self, keys: Collection[ObjectKey]) -> "Plan":
        """What is left of the plan when the children named by `keys` are left out."""
        return replace(
            self,
            applies=tuple(action for action in self.applies if action.key not in keys),
            edits=tuple(each for each in self.edits if each.key not in keys),
            restarts=tuple(each for each in self.restarts if each.key not in keys),
            deletes=tuple(each for each in self.deletes if each.key not in keys),
        )

    def in_turns(self) -> tuple["Plan", "Plan"]:
        """What a changed spec waits for first, its workloads with all that their pods need; then what may follow later.

        A workload that is being made needs its Service once it has a ready pod, which counts as none until then.
        """
        made = {
            each.workload for each in self.applies if each.cause is Cause.CREATED and each.key.kind in WORKLOAD_KINDS
        }
        later = tuple(each for each in self.applies if each.key.kind == SERVICE and _is_made_for(each, made))
        first = tuple(each for each in self.applies if each not in later)
        return (
            Plan(first, blocked=self.blocked, terminating=self.terminating),
            replace(self, applies=later, blocked=(), terminating=()),
        )


def _is_made_for(action: Apply, workloads: Collection[tuple[str | None, str | None]]) -> bool:
    """Whether it makes the Service of a revision's workload that is one of these."""
    return action.cause is Cause.CREATED and action.workload[1] is not None and action.workload in workloads


def stamped(obj: KubeObject) -> KubeObject:
    """A copy of a desired object that carries its own hash: exactly what is applied."""
    digest = hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()[:16]
    metadata = obj["metadata"]
    return {**obj, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED_HASH: digest}}}


def make_plan(
    desired: Iterable[KubeObject],
    observed: Iterable[KubeObject],
    service: KubeObject,
    edits: Iterable[Edit] = (),
    restarts: tuple[Restart, ...] = (),
    kept: Collection[ObjectKey] = (),
) -> Plan:
    """`desired` as returned by stamped; `observed` may hold objects of other owners (they are left alone).

    `kept` are children that stay as they are although nothing desires them.
    """
    wanted = {object_key(obj): obj for obj in desired}
    live = {object_key(obj): obj for obj in observed}
    ordered = sorted(wanted, key=lambda key: CHILD_KINDS.index(key.kind))
    terminating = tuple(key for key in ordered if key in live and _is_leaving(live[key], service))
    blocked = tuple(
        key for key in ordered if key in live and key not in terminating and _is_foreign(live[key], service)
    )
    free = [key for key in ordered if key not in terminating and key not in blocked]
    applies = [action for key in free if (action := _plan_one(wanted[key], live.get(key))) is not None]
    others = [obj for key, obj in live.items() if key not in wanted]
    owners = [owner for obj in wanted.values() for owner in obj["metadata"].get("ownerReferences", [])][:1]
    adoptions = (Edit.adoption(obj, *owners) for obj in others if owners and _is_orphan(obj))
    deletes = _prune((obj for obj in others if object_key(obj) not in kept), service["metadata"]["uid"])
    return Plan(tuple(applies), (*edits, *adoptions), restarts, deletes, blocked, terminating)


def _plan_one(desired: KubeObject, live: KubeObject | None) -> Apply | None:
    if live is None:
        return Apply(desired, Cause.CREATED)
    if kind_of(desired) == SECRET:
        return None  # pods hold the value that it was made with
    uid = live["metadata"]["uid"]
    wanted_hash = desired["metadata"]["annotations"][APPLIED_HASH]
    if annotation_of(live, APPLIED_HASH) != wanted_hash:
        return Apply(desired, Cause.CHANGED, live_uid=uid)
    drift = tuple(find_drift(desired, live))
    return Apply(desired, Cause.DRIFTED, drift, live_uid=uid) if drift else None


def _prune(unwanted: Iterable[KubeObject], owner_uid: str) -> tuple[Delete, ...]:
    return tuple(
        Delete(object_key(obj), obj["metadata"]["uid"], label_of(obj, REVISION_LABEL))
        for obj in unwanted
        if controller_uid(obj) == owner_uid and not is_terminating(obj)
    )


def _is_orphan(obj: KubeObject) -> bool:
    """Made by an operator, and nobody's since a deletion with cascade=orphan. Secrets nobody may change."""
    is_ours = annotation_of(obj, APPLIED_HASH) is not None and kind_of(obj) != SECRET
    return is_ours and controller_uid(obj) is None and not is_terminating(obj)


def controller_uid(obj: KubeObject) -> str | None:
    """UID of the object's controller; None for one that has no controller."""
    controller = _controller(obj)
    return None if controller is None else str(controller["uid"])


def _controller(obj: KubeObject) -> KubeObject | None:
    return next((ref for ref in obj["metadata"].get("ownerReferences", []) if ref.get("controller")), None)


def _is_leaving(live: KubeObject, service: KubeObject) -> bool:
    """Being deleted, or left over from a deleted service of the same name and about to be garbage collected."""
    controller = _controller(live)
    return is_terminating(live) or (
        controller is not None
        and (controller["kind"], controller["name"]) == (INFERENCE_SERVICE.kind, service["metadata"]["name"])
        and str(controller["uid"]) != str(service["metadata"]["uid"])
    )


def _is_foreign(live: KubeObject, service: KubeObject) -> bool:
    controller = controller_uid(live)
    if controller is not None:
        return controller != str(service["metadata"]["uid"])
    # A child that lost its owner (a cascade=orphan deletion) still has our label: adopt it.
    return label_of(live, SERVICE_LABEL) != str(service["metadata"]["name"])
