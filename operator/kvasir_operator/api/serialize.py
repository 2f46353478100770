"""Dataclasses of api/model.py back to the manifest's own shape."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvasir_operator.api.fields import manifest_fields
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.source import ModelSource


def as_manifest(value: Any) -> Any:
    """A value as YAML would hold it: camelCase keys, absent and default fields left out.

    Leaving defaults out keeps the result the same when a later release adds a field.
    """
    if isinstance(value, (Duration, Quantity, ModelSource)):
        return value.text
    if isinstance(value, tuple):
        return [as_manifest(item) for item in value]
    if isinstance(value, Mapping):
        return {key: as_manifest(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.key: as_manifest(v) for f in manifest_fields(type(value)) if (v := getattr(value, f.name)) != f.default
        }
    return value
