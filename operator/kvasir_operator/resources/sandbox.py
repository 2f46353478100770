"""What every pod of ours runs under: no root, no writable root file system, no capability, no API token by default."""

from collections.abc import Sequence
from typing import Any

USER_ID = 10001

TMP_VOLUME: dict[str, Any] = {"name": "tmp", "emptyDir": {}}
TMP_MOUNT: dict[str, Any] = {"name": "tmp", "mountPath": "/tmp"}
# Libraries write caches under HOME, and the root file system is read-only.
HOME_ENV: dict[str, Any] = {"name": "HOME", "value": "/tmp"}


def pod_security_context() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pull_secrets(names: Sequence[str]) -> dict[str, Any]:
    """The pod's key `imagePullSecrets`; absent where there are none, so that those of its ServiceAccount hold."""
    return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}
