"""The engines of one service, followed through their EndpointSlices; what those say is read in `slices`."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from kvasir_router.endpoints.address import Address
from kvasir_router.endpoints.reflector import Change, ObjectApi, Reflector
from kvasir_router.endpoints.slices import TRAFFIC_WEIGHT_LABEL, addresses_of, traffic_weight
from kvasir_router.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceReference:
    """An InferenceService, or whatever else carries its name in the service label."""

    namespace: str
    name: str
    port: str  # the engines' port: a number, or the name of a port of their Services

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"([a-z0-9-]+)/([a-z0-9-]+):([a-z0-9-]+)", text)
        if match is None:
            raise ConfigError(f"--endpoints-service {text!r} is not NAMESPACE/NAME:PORT, for example models/llama:8000")
        return cls(*match.groups())


class KubernetesSource:
    """Publishes every change of the service's usable addresses. Readiness is Kubernetes' to tell, so it is trusted."""

    is_trusted_ready = True

    def __init__(self, api: ObjectApi, port: str, retry_seconds: float = 0.5) -> None:
        self._slices = Reflector(api, "EndpointSlices", retry_seconds)
        self._port = port

    @property
    def is_synced(self) -> bool:
        return self._slices.is_synced

    async def run(self, publish: Callable[[frozenset[Address]], None]) -> None:
        """Runs until cancelled."""

        def on_change(changes: Sequence[Change]) -> None:
            warn_of_weights(changes)
            publish(addresses_of(self._slices.objects.values(), self._port))

        await self._slices.run(on_change)


def warn_of_weights(changes: Iterable[Change]) -> None:
    """Of slices whose weight is none, and is ignored."""
    for change in changes:
        if change.now is None:
            continue
        try:
            traffic_weight(change.now)
        except ValueError as error:
            name = change.now["metadata"]["name"]
            logger.warning("EndpointSlice %s: %s is ignored: %s", name, TRAFFIC_WEIGHT_LABEL, error)
