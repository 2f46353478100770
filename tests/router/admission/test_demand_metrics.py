from prometheus_client import CollectorRegistry

from kvasir_router.admission.queue import HeldDemand
from kvasir_router.service.series import DemandCollector, bounded


def test_each_services_tenants_have_series_and_an_idle_service_a_zero() -> None:
    registry = CollectorRegistry()
    registry.register(DemandCollector(lambda: {"busy": {"a": HeldDemand(2, 300)}, "idle": {}}))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvasir_router_{name}", labels)

    assert value("queued_requests", service="busy", tenant="a") == 2
    assert value("queued_tokens", service="busy", tenant="a") == 300
    assert value("queued_tokens", service="idle", tenant="") == 0


def test_tenants_beyond_the_bound_are_summed() -> None:
    held = {"small": HeldDemand(1, 1), "large": HeldDemand(1, 100), "tiny": HeldDemand(5, 0)}
    assert bounded(held, max_tenants=1) == {"large": HeldDemand(1, 100), "_others": HeldDemand(6, 1)}


def test_as_many_tenants_as_the_bound_keep_their_names() -> None:
    held = {"a": HeldDemand(1, 1), "b": HeldDemand(1, 2)}
    assert bounded(held, max_tenants=2) == held


def test_a_tenant_by_the_name_of_the_others_is_one_of_them() -> None:
    held = {"_others": HeldDemand(1, 100), "b": HeldDemand(1, 2)}
    assert bounded(held, max_tenants=1) == {"_others": HeldDemand(2, 102)}
