"""What every pod of ours runs under: no root, no writable root file system, no capability.

It passes Pod Security's `restricted` level and OpenShift's restricted-v2. There are no ids in it: the images name a
user that is not root, and OpenShift puts one of the namespace's own in its place and refuses pods that name another.
What an installation or a manifest says in `securityContext` is merged over it as a JSON merge patch: null leaves a
field out.
"""

from collections.abc import Mapping
from typing import Any, Final

TMP_VOLUME: Final[dict[str, Any]] = {"name": "tmp", "emptyDir": {}}
TMP_MOUNT: Final[dict[str, Any]] = {"name": "tmp", "mountPath": "/tmp"}
# Libraries write caches under HOME, and the root file system is read-only.
HOME_ENV: Final[dict[str, Any]] = {"name": "HOME", "value": "/tmp"}

_POD: Final = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Of a container's security context alone; every other field is the pod's, or holds for its containers from there.
_CONTAINER_FIELDS: Final = frozenset({*_CONTAINER, "privileged", "procMount"})


def pod_security_context(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return _merged(_POD, {key: value for key, value in overrides.items() if key not in _CONTAINER_FIELDS})


def container_security_context(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return _merged(_CONTAINER, {key: value for key, value in overrides.items() if key in _CONTAINER_FIELDS})


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch (RFC 7386)."""
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            under = result.get(key)
            result[key] = _merged(under if isinstance(under, Mapping) else {}, value)
        else:
            result[key] = value
    return result
