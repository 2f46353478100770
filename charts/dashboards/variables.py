"""What can be chosen at the top of a dashboard: the data source, and each label by the series that have it.

A variable means the same in every dashboard, because links between them carry it along. "All" is `.*`, not a list of
what is there: so series without the label, such as the gateway's, are shown too.
"""

from dataclasses import dataclass

from charts.dashboards.panels import SOURCE
from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.dashboard import (
    VariableOption,
    VariableRefresh,
    VariableSort,
)

_ALL = VariableOption(selected=True, text="All", value="$__all")


@dataclass(frozen=True)
class Choice:
    """A variable `name` with the values that `label` has in `series`."""

    name: str
    text: str
    label: str
    series: str

    @property
    def query(self) -> str:
        return f"label_values({self.series}, {self.label})"


_IN_NAMESPACE = '{namespace=~"$namespace"}'
_OF_SERVICE = '{namespace=~"$namespace",inference_service=~"$service"}'
_OF_ROLE = '{namespace=~"$namespace",inference_service=~"$service",role=~"$role"}'
# Of engines and routers these are there before the first request, and at zero.
_ENGINE, _ROUTER = "kvasir_http_requests_in_flight", "kvasir_router_in_flight"
_READY = "kvasir_operator_service_ready"
_WANTED = "kvasir_operator_autoscaling_wanted_replicas"
_LEADER = "kvasir_operator_leader"

SERVICES = (
    Choice("namespace", "Namespace", "service_namespace", _READY),
    Choice("service", "Service", "inference_service", f'{_READY}{{service_namespace=~"$namespace"}}'),
)
ENGINES = (
    Choice("namespace", "Namespace", "namespace", _ENGINE),
    Choice("service", "Service", "inference_service", f"{_ENGINE}{_IN_NAMESPACE}"),
    Choice("role", "Role", "role", f"{_ENGINE}{_OF_SERVICE}"),
    Choice("pod", "Pod", "pod", f"{_ENGINE}{_OF_ROLE}"),
)
ROUTERS = (
    Choice("namespace", "Namespace", "namespace", _ROUTER),
    Choice("service", "Service", "inference_service", f"{_ROUTER}{_IN_NAMESPACE}"),
    Choice("router", "Router pod", "pod", f"{_ROUTER}{_OF_SERVICE}"),
)
ENGINES_AND_ROUTERS = ENGINES[:3]
SCALED = (
    Choice("namespace", "Namespace", "service_namespace", _WANTED),
    Choice("service", "Service", "inference_service", f'{_WANTED}{{service_namespace=~"$namespace"}}'),
    Choice(
        "role", "Role", "role", f'{_WANTED}{{service_namespace=~"$namespace",inference_service=~"$service"}}'
    ),
)  # fmt: skip
OPERATORS = (
    Choice("operator_namespace", "Namespace of the operator", "namespace", _LEADER),
    Choice("operator", "Operator pod", "pod", f'{_LEADER}{{namespace=~"$operator_namespace"}}'),
)


def source_variable() -> DatasourceVariable:
    return DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def variable(choice: Choice) -> QueryVariable:
    return (
        QueryVariable(choice.name)
        .label(choice.text)
        .datasource(SOURCE)
        .query(choice.query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(_ALL)
    )
