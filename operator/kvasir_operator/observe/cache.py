"""Services, their children and pods as informers saw them, so that a pass need not ask the API server for them.

What a pass writes is put in at once, so the next one sees it. An object gives way only to a newer state of itself:
resource versions of one kind are compared as numbers, as Kubernetes promises they can be. States are kept as JSON text,
which takes a quarter of the memory of dicts, and without what no pass asks of them; a change of only that is no news.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.kube.kinds import (
    INFERENCE_SERVICE,
    POD,
    WORKLOAD_KINDS,
    Kind,
    KubeObject,
    NamespacedName,
    ServiceKey,
)

_POD_FIELDS = ("nodeName", "readinessGates", "schedulingGates")
_WORKLOAD_STATUS_FIELDS = ("observedGeneration", "replicas", "updatedReplicas")
_WORKLOAD_CONDITIONS = ("ReplicaFailure",)
_CONTROLLERS_ANNOTATIONS = ("deployment.kubernetes.io/revision",)


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    key: ServiceKey
    text: bytes
    """Without the version."""
    acted_on: Hashable
    """A state in which this is the same is no news."""

    def decoded(self) -> KubeObject:
        obj: KubeObject = msgspec.json.decode(self.text)
        obj["metadata"]["resourceVersion"] = str(self.version)
        return obj


class _Listed:
    """What one informer lists. `position` is the version up to which it has seen all; None before the first list."""

    def __init__(self) -> None:
        self.position: int | None = None
        self.entries: dict[NamespacedName, _Entry] = {}
        self.of_service: defaultdict[ServiceKey, set[NamespacedName]] = defaultdict(set)

    def drop(self, name: NamespacedName) -> ServiceKey:
        key = self.entries.pop(name).key
        self.of_service[key].discard(name)
        if not self.of_service[key]:
            del self.of_service[key]
        return key


class InformerCache:
    """Methods that change it return the services that there is news of.

    One informer lists a kind in the whole cluster, or in one namespace where `is_namespaced`.
    """

    def __init__(self, is_namespaced: bool = False) -> None:
        self._is_namespaced = is_namespaced
        self._listed: defaultdict[Kind, defaultdict[str | None, _Listed]] = defaultdict(lambda: defaultdict(_Listed))
        self._writing: Counter[tuple[Kind, NamespacedName]] = Counter()

    def read(self, kind: Kind, key: ServiceKey) -> list[KubeObject] | None:
        """None before the kind's first list is complete."""
        cache = self._of(kind, key.namespace)
        if cache.position is None:
            return None
        return [cache.entries[name].decoded() for name in sorted(cache.of_service.get(key, ()))]

    def read_all(self, kind: Kind, namespace: str | None) -> list[KubeObject] | None:
        """Of all namespaces where that is None; None before the kind's first list is complete."""
        if self._is_namespaced and namespace is None:
            return None
        cache = self._of(kind, namespace)
        if cache.position is None:
            return None
        return [each.decoded() for name, each in cache.entries.items() if namespace in (None, name.namespace)]

    def put(self, kind: Kind, obj: KubeObject) -> set[ServiceKey]:
        """A state that a watch or a list showed."""
        name, version, key = _name(obj), _version(obj), _service_key(kind, obj)
        cache = self._of(kind, name.namespace)
        before = cache.entries.get(name)
        if key is None or (before is not None and before.version >= version):
            return set()
        text = msgspec.json.encode(_trimmed(kind, obj))
        entry = _Entry(version, key, text, _spec_of(obj) if kind == INFERENCE_SERVICE else text)
        news = {key} if before is None else {key, cache.drop(name)}
        cache.entries[name] = entry
        cache.of_service[key].add(name)
        return set() if before is not None and (before.key, before.acted_on) == (key, entry.acted_on) else news

    def put_own(self, kind: Kind, obj: KubeObject) -> None:
        """The answer to a write, unless the watch has shown it already, and perhaps its deletion since."""
        position = self._of(kind, _name(obj).namespace).position
        if position is not None and _version(obj) > position:
            self.put(kind, obj)

    @contextmanager
    def writing(self, kind: Kind, name: NamespacedName) -> Iterator[None]:
        """While a write of ours awaits its answer, which the watch may overtake."""
        self._writing[kind, name] += 1
        try:
            yield
        finally:
            self._writing[kind, name] -= 1
            if not self._writing[kind, name]:
                del self._writing[kind, name]

    def is_writing(self, kind: Kind, obj: KubeObject) -> bool:
        return (kind, _name(obj)) in self._writing

    def remove(self, kind: Kind, obj: KubeObject) -> set[ServiceKey]:
        """A deletion that a watch showed, with the object's last state; a namesake made since then stays."""
        name = _name(obj)
        cache = self._of(kind, name.namespace)
        entry = cache.entries.get(name)
        return {cache.drop(name)} if entry is not None and entry.version <= _version(obj) else set()

    def remove_own(self, kind: Kind, name: NamespacedName) -> None:
        """After a deletion that was accepted; where a finalizer holds the object, the watch puts it back."""
        cache = self._of(kind, name.namespace)
        if name in cache.entries:
            cache.drop(name)

    def begin_list(self, kind: Kind, namespace: str | None, version: int) -> set[ServiceKey]:
        """For each page of one. Versions that went back are those of a restored backup: nothing known holds then."""
        cache = self._of(kind, namespace)
        if cache.position is None or version >= cache.position:
            return set()
        cache.position = None
        return {cache.drop(name) for name in list(cache.entries)}

    def finish_list(
        self, kind: Kind, namespace: str | None, listed: Collection[NamespacedName], version: int
    ) -> set[ServiceKey]:
        """All objects of a list of this version were put: what is older and was not among them is gone."""
        cache = self._of(kind, namespace)
        gone = [name for name, entry in cache.entries.items() if entry.version <= version and name not in listed]
        cache.position = version
        return {cache.drop(name) for name in gone}

    def advance(self, kind: Kind, namespace: str | None, version: int) -> None:
        """The watch has shown all up to this version."""
        self._of(kind, namespace).position = version

    def forget(self, kind: Kind) -> None:
        """The kind is no longer served, and its objects are gone with it."""
        self._listed.pop(kind, None)

    def _of(self, kind: Kind, namespace: str | None) -> _Listed:
        return self._listed[kind][namespace if self._is_namespaced else None]


def _service_key(kind: Kind, obj: KubeObject) -> ServiceKey | None:
    """The service that a child or pod belongs to, by its label."""
    metadata = obj["metadata"]
    name = metadata["name"] if kind == INFERENCE_SERVICE else metadata.get("labels", {}).get(SERVICE_LABEL)
    return None if name is None else ServiceKey(metadata["namespace"], name)


def _spec_of(service: KubeObject) -> Hashable:
    """Its status is mostly the operator's own doing."""
    metadata = service["metadata"]
    return metadata["uid"], metadata["generation"], "deletionTimestamp" in metadata


def _name(obj: KubeObject) -> NamespacedName:
    return NamespacedName(obj["metadata"]["namespace"], obj["metadata"]["name"])


def _version(obj: KubeObject) -> int:
    return int(obj["metadata"]["resourceVersion"])


def _trimmed(kind: Kind, obj: KubeObject) -> KubeObject:
    """Without its version and what no pass asks of it: who set which field (a third of a child), most of a pod's spec,
    of a workload's status what its pods tell better, and all of the status of what has no pods (a budget counts them).
    """
    metadata = _without(obj["metadata"], ("managedFields", "resourceVersion"))
    if "annotations" in metadata:
        metadata["annotations"] = _without(metadata["annotations"], _CONTROLLERS_ANNOTATIONS)
    stripped = {**obj, "metadata": metadata}
    if kind == INFERENCE_SERVICE:
        return stripped
    if kind == POD:
        return {**stripped, "spec": _only(obj.get("spec", {}), _POD_FIELDS)}
    if kind not in WORKLOAD_KINDS:
        return _without(stripped, ("status",))
    if "status" in obj:
        conditions = [each for each in obj["status"].get("conditions", []) if each["type"] in _WORKLOAD_CONDITIONS]
        return {**stripped, "status": {**_only(obj["status"], _WORKLOAD_STATUS_FIELDS), "conditions": conditions}}
    return stripped


def _only(fields: KubeObject, names: Collection[str]) -> KubeObject:
    return {name: value for name, value in fields.items() if name in names}


def _without(fields: KubeObject, names: Collection[str]) -> KubeObject:
    return {name: value for name, value in fields.items() if name not in names}
