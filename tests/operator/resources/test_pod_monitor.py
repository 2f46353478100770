"""PodMonitors: whose pods they select, on which port, and what the installation adds."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.defaults import InstallationDefaults, PodMonitorDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.quantity import Duration
from kvasir_operator.desired.roles import Role, engine_roles, router_roles
from kvasir_operator.kube.kinds import POD_MONITOR, kind_of
from kvasir_operator.resources.pod_monitor import pod_monitor
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
RenderPod = Callable[..., dict[str, Any]]
PLAIN = PodMonitorDefaults()


def monitors(service: InferenceService, defaults: PodMonitorDefaults = PLAIN) -> dict[str, Any]:
    """By role."""
    settings = OperatorSettings(defaults=InstallationDefaults(pod_monitors=defaults))
    roles: list[Role] = [*engine_roles(service, settings.defaults), *router_roles(service, settings.defaults)]
    return {role.name: pod_monitor(service, role, settings) for role in roles}


def test_each_roles_pods_are_scraped_where_they_show_metrics(
    make_service: MakeService, engine_template: RenderPod, router_template: RenderPod
) -> None:
    found = monitors(make_service())

    for role, template in (("serve", engine_template()), ("router", router_template())):
        [endpoint] = found[role]["spec"]["podMetricsEndpoints"]
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        selected = found[role]["spec"]["selector"]["matchLabels"]
        assert ports[endpoint["port"]] == {"serve": 8000, "router": 9090}[role]
        assert selected.items() <= template["metadata"]["labels"].items()
        assert kind_of(found[role]) == POD_MONITOR


def test_series_are_named_by_service_and_role(make_service: MakeService) -> None:
    for monitor in monitors(make_service()).values():
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["inference_service", "role"]


def test_a_manifest_may_want_none(make_service: MakeService) -> None:
    assert set(monitors(make_service(monitoring={"podMonitor": "none"})).values()) == {None}


@pytest.mark.parametrize("role", ["serve", "router"])
def test_the_installations_labels_and_interval_are_added(make_service: MakeService, role: str) -> None:
    plain = monitors(make_service())[role]
    wanted = PodMonitorDefaults({"release": "kps", "serving.kvasir.dev/service": "x"}, Duration("15s"))
    monitor = monitors(make_service(), wanted)[role]

    assert monitor["metadata"]["labels"] == {**plain["metadata"]["labels"], "release": "kps"}
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "15s"
    assert "interval" not in plain["spec"]["podMetricsEndpoints"][0]
