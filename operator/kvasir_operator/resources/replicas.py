"""How many pods each role gets."""

from kvasir_operator.api.model import AutoscalingSpec, InferenceService

DEFAULT_ROUTER_REPLICAS = 2


def engine_replicas(service: InferenceService) -> int:
    """Pods of the serve role. Where a feature is not acted on yet, the number that stands in for it."""
    split = service.spec.disaggregation
    if split is not None:
        return sum(_role_replicas(role.replicas, role.autoscaling) for role in (split.prefill, split.decode))
    return _role_replicas(service.spec.replicas, service.spec.autoscaling)


def router_replicas(service: InferenceService) -> int:
    """Pods of the service's own router."""
    replicas = service.spec.router.replicas
    return DEFAULT_ROUTER_REPLICAS if replicas is None else replicas


def _role_replicas(replicas: int | None, autoscaling: AutoscalingSpec | None) -> int:
    if autoscaling is not None:
        return max(1, autoscaling.min_replicas)
    return 1 if replicas is None else replicas
