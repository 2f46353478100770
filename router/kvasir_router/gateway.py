"""The services behind a gateway: one for each InferenceService of its scope, which come and go while it runs.

A request belongs to the service that owns the model's name. A service that is gone takes no more requests, and refuses
those that wait; what its engines have begun goes on to its end.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from typing import Any

from kvasir_router.endpoints.gateway_source import ServedService
from kvasir_router.endpoints.inference_services import InferenceService, claims
from kvasir_router.endpoints.objects import ObjectKey
from kvasir_router.errors import MissingModelError, UnknownModelError
from kvasir_router.service.factory import ServiceFactory, ServiceSettings
from kvasir_router.service.service import Follow, Service, Services


class Gateway(Services):
    """`secret` is the gateway's own, None where nothing is set."""

    def __init__(self, factory: ServiceFactory, follow: Follow, secret: str | None) -> None:
        self._factory = factory
        self._follow = follow
        self._secret = secret
        self._manifests: dict[ObjectKey, InferenceService] = {}
        self._services: dict[ObjectKey, Service] = {}
        self._leaving: set[Service] = set()  # until nothing is in flight there
        self._claims: Mapping[str, ObjectKey] = {}

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services.values())

    def of(self, model: str | None) -> Service:
        if model is None:
            raise MissingModelError(
                "the request names no model; this router serves several: name one of /v1/models", param="model"
            )
        key = self._claims.get(model)
        if key is None:
            raise UnknownModelError(f"the model {model!r} is not served here; see /v1/models", param="model")
        return self._services[key]

    def cards(self) -> list[dict[str, Any]]:
        return [self._services[key].catalog.card(name) for name, key in self._claims.items()]

    def publish(self, changed: Mapping[ObjectKey, ServedService | None]) -> None:
        """Takes over what is said of the services that have changed."""
        for key, served in changed.items():
            if served is None:
                self._remove(key)
            else:
                self._keep(served)
        self._claims = claims(self._manifests.values())
        self._leaving = {service for service in self._leaving if service.prober.num_watched}

    async def close(self) -> None:
        for service in (*self, *self._leaving):
            await service.close()

    def _keep(self, served: ServedService) -> None:
        manifest = served.manifest
        known = self._services.get(manifest.key)
        if known is None:
            self._services[manifest.key] = self._factory.create(self._settings(manifest))
        elif self._manifests[manifest.key] != manifest:
            self._factory.configure(known, self._settings(manifest))
        self._manifests[manifest.key] = manifest
        self._follow(self._services[manifest.key], served.addresses)

    def _remove(self, key: ObjectKey) -> None:
        service = self._services.pop(key, None)
        if service is not None:
            del self._manifests[key]
            self._follow(service, frozenset())
            service.admission.refuse_all(lambda: _gone(service))
            self._leaving.add(service)

    def _settings(self, manifest: InferenceService) -> ServiceSettings:
        name = f"{manifest.namespace}/{manifest.name}"
        return ServiceSettings(
            name=name,
            model=manifest.model,
            aliases=manifest.aliases,
            adapters=manifest.adapters,
            created=int(manifest.created.timestamp()),
            policy=manifest.policy,
            remote_prefill_min_tokens=manifest.remote_prefill_min_tokens,
            max_queue_size=manifest.max_queue_size,
            max_queue_wait_seconds=manifest.max_queue_wait_seconds,
            router_secret=None if self._secret is None else derived_secret(self._secret, name),
        )


def _gone(service: Service) -> UnknownModelError:
    return UnknownModelError(f"the service {service.name} is gone, and its models with it; see /v1/models")


def derived_secret(gateway_secret: str, service_name: str) -> str:
    """What a service's engines know the gateway by: none of them can speak for it to another's. As the operator's."""
    return hmac.new(gateway_secret.encode(), service_name.encode(), hashlib.sha256).hexdigest()
