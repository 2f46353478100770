"""The Secret by which a service's engines know their router from other callers.

An engine believes a tenant's name or a stream's journal only from its router. What a router of the service's own shares
with them is drawn when the Secret is made, and stays: it is no part of the desired object, so neither a pass nor a
revision depends on it. What the gateway shows is derived from the gateway's own secret, so that it reads no Secret of
any service. A digest of it is part of the Secret's name: engines that learned another are of another revision.
"""

import hashlib
import hmac
import secrets
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.settings import OperatorSettings

_KEY: Final = "secret"
_NUM_RANDOM_BYTES: Final = 32
_DIGEST_LENGTH: Final = 10
_DRAWN: Final = "a random value is put in when this is made, and stays; delete it and restart all pods for another"
_DERIVED: Final = "derived from the gateway's secret; change that one for another"


def router_secret(service: InferenceService, settings: OperatorSettings) -> dict[str, Any] | None:
    """Without its value where that is drawn (`with_random_value`); None where the gateway is to have it and is not."""
    if not service.is_behind_gateway:
        return _secret(service, router_secret_name(service, settings), _DRAWN)
    value = _gateway_value(service, settings)
    if value is None:
        return None
    return {**_secret(service, router_secret_name(service, settings), _DERIVED), "stringData": {_KEY: value}}


def router_secret_name(service: InferenceService, settings: OperatorSettings) -> str:
    if not service.is_behind_gateway:
        return labels.router_name(service.name)
    value = _gateway_value(service, settings)
    digest = None if value is None else hashlib.sha256(value.encode()).hexdigest()[:_DIGEST_LENGTH]
    return labels.gateway_secret_name(service.name, digest)


def with_random_value(secret: dict[str, Any]) -> dict[str, Any]:
    """The Secret as it is to be made, with 256 bits that nobody else knows."""
    return {**secret, "stringData": {_KEY: secrets.token_urlsafe(_NUM_RANDOM_BYTES)}}


def router_secret_env(service: InferenceService, settings: OperatorSettings) -> dict[str, Any]:
    """The environment variable of router and engine containers that holds it."""
    reference = {"name": router_secret_name(service, settings), "key": _KEY}
    return {"name": labels.ROUTER_SECRET_ENV, "valueFrom": {"secretKeyRef": reference}}


def derived_secret(gateway_secret: str, namespace: str, name: str) -> str:
    """What the gateway shows to the engines of one service, in 64 hexadecimal digits: the gateway computes the same."""
    return hmac.new(gateway_secret.encode(), f"{namespace}/{name}".encode(), hashlib.sha256).hexdigest()


def _gateway_value(service: InferenceService, settings: OperatorSettings) -> str | None:
    if settings.gateway_secret is None:
        return None
    return derived_secret(settings.gateway_secret, service.namespace, service.name)


def _secret(service: InferenceService, name: str, note: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            **metadata(service, name, labels.ROLE_ROUTER),
            "annotations": {f"{labels.GROUP}/value": note},
        },
        "type": "Opaque",
        "immutable": True,
    }
