"""The revision of a service: a short name for everything that shapes its engine pods.

Pods of different revisions never exchange KV blocks, so what changes a pod must change the revision, and what only
changes how many there are, or the router, must not: a new revision restarts every engine. It is taken from the pods'
templates themselves, so an image or a rule of the operator's own counts like a field of the manifest.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings

_REVISION_LENGTH: Final = 10


def revision_of(service: InferenceService, roles: Iterable[EngineRole], settings: OperatorSettings) -> str:
    """First 10 hex digits of the SHA-256 over the templates of all engine roles, which so share one revision."""
    templates = {role.name: engine_pod_template(service, role, settings) for role in roles}
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_LENGTH]
