"""The revision of a service: a short name for everything that shapes its engine pods.

Pods of different revisions never exchange KV blocks, so what changes a pod must change the revision, and what only
changes how many there are, or the router, must not: a new revision restarts every engine. It is taken from the pods'
templates themselves, so an image or a rule of the operator's own counts like a field of the manifest.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, Final

from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings

_REVISION_LENGTH: Final = 10


def revision_of(service: InferenceService, roles: Iterable[EngineRole], settings: OperatorSettings) -> str:
    """First 10 hex digits of the SHA-256 over the templates of all engine roles, which so share one revision.

    An amount counts, and not how it is spelt: the API server stores it one way, and no pod changes.
    """
    service = _canonical(service)
    templates = {role.name: engine_pod_template(service, _canonical(role), settings) for role in roles}
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_LENGTH]


def _canonical(value: Any) -> Any:
    """With every quantity within it spelt as the API server does; the same object where it holds none."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Quantity):
        return _spelt(value)
    if (names := _field_names(value.__class__)) is not None:
        changed = {name: new for name in names if (new := _canonical(old := getattr(value, name))) is not old}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        return {key: _canonical(each) for key, each in value.items()} if value else value
    return tuple(map(_canonical, value)) if isinstance(value, tuple) and value else value


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...] | None:
    """None of what is no dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@lru_cache(maxsize=1024)
def _spelt(quantity: Quantity) -> Quantity:
    """Few amounts are in use."""
    return quantity.canonical
