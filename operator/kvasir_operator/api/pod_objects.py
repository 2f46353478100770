"""Fields of the Kubernetes objects that manifests pass through, so that `render` and `local` name a typo.

The CRD takes these objects as they are: their schemas are long, and it would have each in four places. A shape is a
scalar's type, `[shape]` a list, `{name: shape}` an object, `{str: shape}` a map. Which words a text may be, and what
must be there, is Kubernetes' to check.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
_EXPRESSIONS: Final = [{"key": str, "operator": str, "values": [str]}]
_LABELS: Final = {"matchLabels": {str: str}, "matchExpressions": _EXPRESSIONS}
_NODES: Final = {"matchExpressions": _EXPRESSIONS, "matchFields": _EXPRESSIONS}
_PODS: Final = {
    "topologyKey": str,
    "labelSelector": _LABELS,
    "namespaceSelector": _LABELS,
    "namespaces": [str],
    "matchLabelKeys": [str],
    "mismatchLabelKeys": [str],
}
_POD_AFFINITY: Final = {_REQUIRED: [_PODS], _PREFERRED: [{"weight": int, "podAffinityTerm": _PODS}]}
_AFFINITY: Final = {
    "nodeAffinity": {
        _REQUIRED: {"nodeSelectorTerms": [_NODES]},
        _PREFERRED: [{"weight": int, "preference": _NODES}],
    },
    "podAffinity": _POD_AFFINITY,
    "podAntiAffinity": _POD_AFFINITY,
}
_PROFILE: Final = {"type": str, "localhostProfile": str}
# Of pods and of containers.
_SECURITY_CONTEXT: Final = {
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), int),
    **dict.fromkeys(("runAsNonRoot", "allowPrivilegeEscalation", "privileged", "readOnlyRootFilesystem"), bool),
    **dict.fromkeys(("fsGroupChangePolicy", "procMount", "seLinuxChangePolicy", "supplementalGroupsPolicy"), str),
    "supplementalGroups": [int],
    "capabilities": {"add": [str], "drop": [str]},
    "seLinuxOptions": dict.fromkeys(("level", "role", "type", "user"), str),
    "seccompProfile": _PROFILE,
    "appArmorProfile": _PROFILE,
    "sysctls": [{"name": str, "value": str}],
    "windowsOptions": {
        **dict.fromkeys(("gmsaCredentialSpec", "gmsaCredentialSpecName", "runAsUserName"), str),
        "hostProcess": bool,
    },
}


@dataclass(frozen=True)
class Shape:
    """Of an object that is passed through; nulls are, too."""

    fields: Mapping[str, Any]


AffinityObject = Annotated[Mapping[str, Any], Shape(_AFFINITY)]
SecurityContextObject = Annotated[Mapping[str, Any], Shape(_SECURITY_CONTEXT)]
