"""What a gateway routes for: the InferenceServices of its namespaces, each with the addresses of its engines.

Two watches a namespace, or two in all where it is for all of them, however many services there are.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvasir_router.endpoints.address import Address
from kvasir_router.endpoints.inference_services import InferenceService
from kvasir_router.endpoints.kubernetes import warn_of_weights
from kvasir_router.endpoints.objects import KubernetesObject, ObjectKey, key_of
from kvasir_router.endpoints.reflector import Change, ObjectApi, Reflector
from kvasir_router.endpoints.slices import SERVICE_LABEL, addresses_of

logger = logging.getLogger(__name__)

ENGINE_PORT = "http"
"""Its name in the engines' Services."""


@dataclass(frozen=True, slots=True)
class ServedService:
    manifest: InferenceService
    addresses: frozenset[Address]


Publish = Callable[[Mapping[ObjectKey, ServedService | None]], None]
"""Takes the services that have changed, by namespace and name; None: there is none, or it is not the gateway's."""


@dataclass(frozen=True)
class ScopeApi:
    """The API's objects of one namespace, or of all."""

    services: ObjectApi
    slices: ObjectApi


class GatewaySource:
    """Readiness of engines is Kubernetes' to tell, so it is trusted."""

    def __init__(self, scopes: Sequence[ScopeApi], retry_seconds: float = 0.5) -> None:
        self._reflectors = [
            (
                Reflector(scope.services, "InferenceServices", retry_seconds),
                Reflector(scope.slices, "EndpointSlices", retry_seconds),
            )
            for scope in scopes
        ]
        self._manifests: dict[ObjectKey, InferenceService] = {}
        self._slices: dict[ObjectKey, dict[ObjectKey, KubernetesObject]] = {}  # by service

    @property
    def is_synced(self) -> bool:
        """Once everything has been listed."""
        return all(services.is_synced and slices.is_synced for services, slices in self._reflectors)

    async def run(self, publish: Publish) -> None:
        """Runs until cancelled."""

        def on_services(changes: Sequence[Change]) -> None:
            self._publish({self._keep_manifest(change) for change in changes}, publish)

        def on_slices(changes: Sequence[Change]) -> None:
            warn_of_weights(changes)
            self._publish({key for change in changes for key in self._keep_slice(change)}, publish)

        async with asyncio.TaskGroup() as group:
            for services, slices in self._reflectors:
                group.create_task(services.run(on_services))
                group.create_task(slices.run(on_slices))

    def _publish(self, keys: set[ObjectKey], publish: Publish) -> None:
        publish({key: self._served(key) for key in keys})

    def _served(self, key: ObjectKey) -> ServedService | None:
        manifest = self._manifests.get(key)
        if manifest is None:
            return None
        return ServedService(manifest, addresses_of(self._slices.get(key, {}).values(), ENGINE_PORT))

    def _keep_manifest(self, change: Change) -> ObjectKey:
        one = change.now or change.before
        assert one is not None
        key = key_of(one)
        manifest = None if change.now is None else _read(change.now)
        if manifest is None:
            self._manifests.pop(key, None)
        else:
            self._manifests[key] = manifest
        return key

    def _keep_slice(self, change: Change) -> list[ObjectKey]:
        """Returns the services that it concerns: the one that it belonged to, and the one that it belongs to now."""
        keys = []
        if change.before is not None:
            keys.append(_service_of(change.before))
            of_service = self._slices.get(keys[-1], {})
            of_service.pop(key_of(change.before), None)
            if not of_service:
                self._slices.pop(keys[-1], None)
        if change.now is not None:
            keys.append(_service_of(change.now))
            self._slices.setdefault(keys[-1], {})[key_of(change.now)] = change.now
        return keys


def _service_of(endpoint_slice: KubernetesObject) -> ObjectKey:
    metadata = endpoint_slice["metadata"]
    return metadata["namespace"], metadata["labels"][SERVICE_LABEL]


def _read(manifest: KubernetesObject) -> InferenceService | None:
    """A manifest of another release may lack what this one reads: it must not take all other services with it."""
    try:
        return InferenceService.read(manifest)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("InferenceService %s/%s is not served: cannot read %r", *key_of(manifest), error)
        return None
