"""A Kubernetes API in memory, with the behaviour that the operator's edges rely on: conflicts and versions."""

import copy
from collections.abc import AsyncIterator
from typing import Any

from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.errors import KubeApiError, ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kinds import Kind, KubeObject, kind_of
from kvasir_operator.kube import KubeClient


class MemoryKube(KubeClient):
    """`failures` are raised by the next calls, first to last; None lets one call through."""

    def __init__(self) -> None:
        super().__init__(Configuration())
        self.objects: dict[tuple[str, str, str], KubeObject] = {}
        self.writes: list[tuple[str, str]] = []
        self.failures: list[KubeApiError | None] = []
        self._version = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> KubeObject | None:
        self._fail()
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    async def create(self, obj: KubeObject) -> KubeObject:
        self._fail()
        if self._key(obj) in self.objects:
            raise ObjectConflictError("already exists", 409)
        return self._store("create", obj)

    async def replace(self, obj: KubeObject) -> KubeObject:
        self._fail()
        stored = self.objects[self._key(obj)]
        if obj["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]:
            raise ObjectConflictError("changed", 409)
        return self._store("replace", obj)

    async def apply(self, obj: KubeObject, field_manager: str = FIELD_MANAGER) -> KubeObject:
        self._fail()
        return self._store(f"apply by {field_manager}", obj)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> KubeObject:
        self._fail()
        if (kind.kind, namespace, name) not in self.objects:
            raise ObjectNotFoundError("not found", 404)
        return self._store("patch", _merged(self.objects[(kind.kind, namespace, name)], patch))

    async def merge_status(self, kind: Kind, namespace: str, name: str, status: dict[str, Any]) -> KubeObject:
        self._fail()
        stored = self.objects[(kind.kind, namespace, name)]
        return self._store("patch status", {**stored, "status": {**stored.get("status", {}), **status}})

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._fail()
        self.writes.append(("delete", f"{kind.kind} {name}"))
        self.objects.pop((kind.kind, namespace, name), None)

    async def list_pages(
        self, kind: Kind, namespace: str | None, selector: str | None = None, fields: str | None = None
    ) -> AsyncIterator[KubeObject]:
        """One object a page."""
        self._fail()
        found = [obj for (name, _, _), obj in self.objects.items() if name == kind.kind and _selects(selector, obj)]
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


def _selects(selector: str | None, obj: KubeObject) -> bool:
    """For `KEY` and `KEY=VALUE`."""
    key, _, value = (selector or "").partition("=")
    labels = obj["metadata"].get("labels", {})
    return not key or (key in labels and value in ("", labels[key]))
