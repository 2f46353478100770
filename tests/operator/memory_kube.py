"""A Kubernetes API in memory, with the behaviour that the operator's edges rely on: conflicts and versions."""

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.errors import KindNotServedError, KubeApiError, ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.client import KubeClient, LabelSelector
from kvasir_operator.kube.kinds import Kind, KubeObject, kind_of


class MemoryKube(KubeClient):
    """`failures` are raised by the next calls, first to last; None lets one call through.

    `admission` changes what is applied, as a mutating webhook does.
    """

    def __init__(self) -> None:
        super().__init__(Configuration())
        self.objects: dict[tuple[str, str, str], KubeObject] = {}
        self.writes: list[tuple[str, str]] = []
        self.failures: list[KubeApiError | None] = []
        self.admission: Callable[[KubeObject], KubeObject] = lambda obj: obj
        self.num_dry_runs = 0
        self._version = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        self._fail()
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def read_path(self, path: str) -> dict[str, Any]:
        """A cluster without optional kinds."""
        self._fail()
        raise KindNotServedError("404 page not found", 404)

    async def create(self, obj: KubeObject) -> KubeObject:
        self._fail()
        if self._key(obj) in self.objects:
            raise ObjectConflictError("already exists", 409)
        return self._store("create", obj)

    async def replace(self, obj: KubeObject) -> KubeObject:
        self._fail()
        live, wanted = self.objects.get(self._key(obj), {"metadata": {}})["metadata"], obj["metadata"]
        if any(wanted.get(key) != live.get(key) for key in ("uid", "resourceVersion")):
            raise ObjectConflictError("changed, or gone", 409)
        return self._store("replace", obj)

    async def apply(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        self._fail()
        return self._store(f"apply by {field_manager}", self.admission(copy.deepcopy(obj)))

    async def dry_run(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        self._fail()
        self.num_dry_runs += 1
        return self.admission(copy.deepcopy(obj))

    async def merge(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> KubeObject:
        self._fail()
        if (kind.kind, namespace, name) not in self.objects:
            raise ObjectNotFoundError("not found", 404)
        live, wanted = self.objects[(kind.kind, namespace, name)]["metadata"], patch.get("metadata", {})
        if any(key in wanted and wanted[key] != live.get(key) for key in ("uid", "resourceVersion")):
            raise ObjectConflictError("changed", 409)
        return self._store("patch", _merged(self.objects[(kind.kind, namespace, name)], patch))

    async def apply_status(self, obj: KubeObject) -> KubeObject:
        """Nobody else writes statuses here, so that what is left out is gone."""
        self._fail()
        stored = self.objects.get(self._key(obj))
        if stored is None:
            raise ObjectNotFoundError("not found", 404)
        if stored["metadata"].get("resourceVersion") != obj["metadata"].get("resourceVersion"):
            raise ObjectConflictError("changed", 409)
        return self._store("apply status", {**stored, "status": obj["status"]})

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        uid: str,
        grace_seconds: int | None = None,
        *,
        is_foreground: bool = False,
    ) -> None:
        self._fail()
        self.writes.append(("delete in the foreground" if is_foreground else "delete", f"{kind.kind} {name}"))
        self.objects.pop((kind.kind, namespace, name), None)

    async def list_pages(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> AsyncIterator[KubeObject]:
        """One object a page."""
        self._fail()
        found = [obj for (name, _, _), obj in self.objects.items() if name == kind.kind and _selects(labels or {}, obj)]
        found = [obj for obj in found if _has_field(fields, obj)]
        metadata = {"resourceVersion": str(self._version)}
        if not found:
            yield {"metadata": metadata, "items": None}
        for obj in found:
            yield {"metadata": metadata, "items": [obj]}

    def _store(self, verb: str, obj: KubeObject) -> KubeObject:
        self._version += 1
        uid = self.objects.get(self._key(obj), obj)["metadata"].get("uid", f"uid-of-{self._version}")
        stored = {**obj, "metadata": {**obj["metadata"], "uid": uid, "resourceVersion": str(self._version)}}
        self.objects[self._key(obj)] = stored
        self.writes.append((verb, f"{obj['kind']} {obj['metadata']['name']}"))
        return copy.deepcopy(stored)

    def _fail(self) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure

    def _key(self, obj: KubeObject) -> tuple[str, str, str]:
        return (kind_of(obj).kind, obj["metadata"]["namespace"], obj["metadata"]["name"])


def _merged(obj: Any, patch: Any) -> Any:
    """As a JSON merge patch has it: None takes a key away."""
    if not (isinstance(obj, dict) and isinstance(patch, dict)):
        return patch
    merged = {**obj, **{key: _merged(obj.get(key, {}), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _has_field(fields: str | None, obj: KubeObject) -> bool:
    """For `PATH=VALUE`."""
    path, _, value = (fields or "").partition("=")
    found: Any = obj
    for key in path.split(".") if path else ():
        found = found.get(key, {})
    return not path or found == value


def _selects(selector: LabelSelector, obj: KubeObject) -> bool:
    labels = obj["metadata"].get("labels", {})
    return all(key in labels and value in (None, labels[key]) for key, value in selector.items())
