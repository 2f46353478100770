"""What an installation sets for all services: defaults by kind of pod, named profiles, and who observes the pods.

It comes from the chart's values as one YAML file (`--pod-defaults FILE`), in the words of the manifest. A manifest's
own fields win over a profile's, and a profile's over the defaults.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvasir_operator.api.manifests import read_documents
from kvasir_operator.api.model import PROFILE_NAME, LabelMap, ObjectName, PodSpec, ResourcesSpec, RouterResources
from kvasir_operator.api.parse import parse_group
from kvasir_operator.api.quantity import Duration
from kvasir_operator.errors import InvalidManifestError

Overlay = TypeVar("Overlay", PodSpec, ResourcesSpec, RouterResources)


@dataclass(frozen=True)
class PodDefaults:
    """Of one kind of pod, or of one profile."""

    pod: PodSpec = field(default_factory=PodSpec)
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)


@dataclass(frozen=True)
class RouterDefaults:
    """What holds for router pods; the manifest's own say comes over it."""

    pod: PodSpec = field(default_factory=PodSpec)
    resources: RouterResources = field(default_factory=RouterResources)


@dataclass(frozen=True)
class NetworkPeer:
    """Pods, by their own labels and those of their namespace; without labels all of them."""

    namespace_labels: LabelMap = field(default_factory=dict)
    pod_labels: LabelMap = field(default_factory=dict)


# What the Prometheus operator and the community's chart label its pods with.
_PROMETHEUS = NetworkPeer(pod_labels={"app.kubernetes.io/name": "prometheus"})


@dataclass(frozen=True)
class NetworkPeers:
    """Who, besides clients and the service itself, NetworkPolicies let in to its pods."""

    operator: NetworkPeer | None = None  # None: it is no pod of the cluster
    metrics: tuple[NetworkPeer, ...] = (_PROMETHEUS,)


@dataclass(frozen=True)
class PodMonitorDefaults:
    """Of the PodMonitors of all services."""

    labels: LabelMap = field(default_factory=dict)  # by which a Prometheus selects them
    interval: Duration | None = None  # None: Prometheus's own


@dataclass(frozen=True)
class GatewayDefaults:
    """The installation's shared router, as the chart makes it: a Deployment and a Service of one name."""

    namespace: ObjectName
    name: ObjectName
    pod_labels: LabelMap


@dataclass(frozen=True)
class InstallationDefaults:
    """`engine` and `router` hold for every such pod, a profile for the engine pods of services that name it."""

    engine: PodDefaults = field(default_factory=PodDefaults)
    router: RouterDefaults = field(default_factory=RouterDefaults)
    profiles: Mapping[str, PodDefaults] = field(default_factory=dict)
    network_peers: NetworkPeers = field(default_factory=NetworkPeers)
    pod_monitors: PodMonitorDefaults = field(default_factory=PodMonitorDefaults)
    gateway: GatewayDefaults | None = None  # None: services cannot be behind one


def read_defaults(path: Path) -> InstallationDefaults:
    """From a YAML file; an empty one sets nothing.

    Raises UnreadableManifestError for a file that is no YAML, InvalidManifestError for one that does not hold, with the
    file's name and the field in front.
    """
    documents = read_documents(path)
    try:
        if len(documents) > 1:
            raise InvalidManifestError("", f"{len(documents)} documents, expected one")
        defaults = parse_group(InstallationDefaults, documents[0] if documents else {}, "")
        _check(defaults)
    except InvalidManifestError as error:
        raise InvalidManifestError(f"{path}: {error.field_path}".rstrip(": "), error.reason) from error
    return defaults


def _check(defaults: InstallationDefaults) -> None:
    """Raises InvalidManifestError for what could never have an effect."""
    for name in defaults.profiles:
        if not re.fullmatch(PROFILE_NAME, name):
            raise InvalidManifestError(f"profiles.{name}", f"no manifest can name it: expected {PROFILE_NAME}")
    for where, resources in _resources(defaults):
        if resources.profile is not None:
            raise InvalidManifestError(
                f"{where}.profile", "profiles do not build on one another: write its fields here"
            )


def _resources(defaults: InstallationDefaults) -> Iterator[tuple[str, ResourcesSpec]]:
    yield "engine.resources", defaults.engine.resources
    for name, profile in defaults.profiles.items():
        yield f"profiles.{name}.resources", profile.resources


def overlaid(base: Overlay, over: Overlay) -> Overlay:
    """`base` with what `over` says: maps merged by key, lists joined (of equal names the later wins), else replaced."""
    values = {
        f.name: _overlaid_value(getattr(base, f.name), getattr(over, f.name)) for f in dataclasses.fields(type(base))
    }
    return dataclasses.replace(base, **values)


def _overlaid_value(base: Any, over: Any) -> Any:
    if over is None:
        return base
    if isinstance(over, Mapping):
        return {**base, **over}
    if isinstance(over, tuple):
        names = {_identity(item) for item in over}
        return (*(item for item in base if _identity(item) not in names), *over)
    return over


def _identity(item: Any) -> Any:
    """A list's element by its name or path; itself where it has none."""
    return getattr(item, "name", None) or getattr(item, "mount_path", None) or item
