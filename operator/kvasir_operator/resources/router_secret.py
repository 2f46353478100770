"""The Secret that a service's router and engines share, by which engines know their router from other callers.

An engine believes a tenant's name or a stream's journal only from its router. The value is drawn when the Secret is
made and stays: it is no part of the desired object, so neither a pass nor a revision depends on it.
"""

import secrets
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata

_KEY: Final = "secret"
_NUM_RANDOM_BYTES: Final = 32
_NOTE: Final = "a random value is put in when this is made, and stays; delete it and restart all pods for another"


def router_secret(service: InferenceService) -> dict[str, Any]:
    """Without its value (`with_random_value`)."""
    described = metadata(service, labels.router_name(service.name), labels.ROLE_ROUTER)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**described, "annotations": {f"{labels.GROUP}/value": _NOTE}},
        "type": "Opaque",
        "immutable": True,
    }


def with_random_value(secret: dict[str, Any]) -> dict[str, Any]:
    """The Secret as it is to be made, with 256 bits that nobody else knows."""
    return {**secret, "stringData": {_KEY: secrets.token_urlsafe(_NUM_RANDOM_BYTES)}}


def router_secret_env(service: InferenceService) -> dict[str, Any]:
    """The environment variable of router and engine containers that holds it."""
    reference = {"name": labels.router_name(service.name), "key": _KEY}
    return {"name": labels.ROUTER_SECRET_ENV, "valueFrom": {"secretKeyRef": reference}}
