"""InferenceServices that a gateway routes for, as far as their manifests concern it. Pure.

A name that several claim belongs to the service that was created first, then by namespace and name; the operator says
so in the status of the others, by the same rule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from kvasir_router.config import PolicyName, parse_duration
from kvasir_router.endpoints.objects import KubernetesObject, ObjectKey

GROUP, VERSION, PLURAL = "serving.kvasir.dev", "v1alpha1", "inferenceservices"


@dataclass(frozen=True, slots=True)
class InferenceService:
    namespace: str
    name: str
    created: datetime
    model: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]
    policy: PolicyName
    remote_prefill_min_tokens: int | None  # None: the router's cost decides
    max_queue_size: int
    max_queue_wait_seconds: float

    @classmethod
    def read(cls, manifest: KubernetesObject) -> Self | None:
        """None where it has a router of its own.

        The CRD's schema has set every default and has let nothing through that does not fit it.
        """
        metadata, spec = manifest["metadata"], manifest["spec"]
        router = spec.get("router", {})
        if router.get("mode") != "gateway":
            return None
        adapters = spec.get("engine", {}).get("adapters") or {}
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            created=datetime.fromisoformat(metadata["creationTimestamp"]),
            model=spec["model"].get("name") or metadata["name"],
            aliases=tuple(spec["model"].get("aliases", ())),
            adapters=tuple(adapter["name"] for adapter in adapters.get("list", ())),
            policy=router["policy"],
            remote_prefill_min_tokens=_min_tokens(spec.get("disaggregation") or {}),
            max_queue_size=router["maxQueueSize"],
            max_queue_wait_seconds=parse_duration(router["maxQueueWait"]),
        )

    @property
    def key(self) -> ObjectKey:
        return self.namespace, self.name

    @property
    def names(self) -> tuple[str, ...]:
        """By which clients may ask for it, unless another service has claimed one before."""
        return (self.model, *self.aliases, *self.adapters)


def claims(services: Iterable[InferenceService]) -> Mapping[str, ObjectKey]:
    """Whose each name is, in the order in which they are listed."""
    owners: dict[str, ObjectKey] = {}
    for service in sorted(services, key=lambda service: (service.created, service.key)):
        for name in service.names:
            owners.setdefault(name, service.key)
    return owners


def _min_tokens(disaggregation: Mapping[str, Any]) -> int | None:
    min_tokens = disaggregation.get("remotePrefillMinTokens", "auto")
    return None if min_tokens == "auto" else int(min_tokens)
