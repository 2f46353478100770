"""The revision of a service: a short name for everything that shapes its engine pods.

Pods of different revisions never exchange KV blocks, so what changes a pod must change the revision, and what only
changes how many there are, or the router, must not.
"""

import hashlib
import json

from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.serialize import as_manifest

_REVISION_LENGTH = 10
_POD_SHAPING = ("model", "engine", "parallelism", "resources", "pod", "monitoring")


def revision_of(service: InferenceService) -> str:
    """First 10 hex digits of the SHA-256 of the pod-shaping spec.

    Fields that hold their default are left out, so a release that adds a field starts no rollout by itself.
    """
    shape = {name: as_manifest(getattr(service.spec, name)) for name in _POD_SHAPING}
    shape["drainTimeout"] = service.spec.rollout.drain_timeout.text
    split = service.spec.disaggregation
    if split is not None:
        roles = {"prefill": split.prefill, "decode": split.decode}
        shape["roles"] = {
            name: [as_manifest(role.parallelism), as_manifest(role.resources)] for name, role in roles.items()
        }
    text = json.dumps({key: value for key, value in shape.items() if value}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_LENGTH]
