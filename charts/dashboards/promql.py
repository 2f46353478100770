"""PromQL of panels: the series that a dashboard's variables choose, and what is asked of them.

Engines and routers have the labels that PodMonitors set (`namespace`, `pod`, `inference_service`, `role`). Series of
the operator and the gateway name the service that they are about by labels of their own (`service_namespace`,
`inference_service`).
"""

from dataclasses import dataclass

WINDOW = "$__rate_interval"
"""Grafana's: four scrapes or one step of the graph, whichever is longer."""


@dataclass(frozen=True)
class Scope:
    """Series that have all of `matchers`, each as PromQL writes one; of each method, `more` are further ones."""

    matchers: tuple[str, ...]

    def of(self, metric: str, *more: str) -> str:
        return f"{metric}{{{','.join((*self.matchers, *more))}}}"

    def sum(self, metric: str, by: str = "", *more: str) -> str:
        return aggregate("sum", by, self.of(metric, *more))

    def max(self, metric: str, by: str = "", *more: str) -> str:
        return aggregate("max", by, self.of(metric, *more))

    def rate(self, metric: str, by: str = "", *more: str) -> str:
        """A second."""
        return aggregate("sum", by, f"rate({self.of(metric, *more)}[{WINDOW}])")

    def increase(self, metric: str, by: str = "", *more: str) -> str:
        """Over the time that the dashboard shows."""
        return aggregate("sum", by, f"increase({self.of(metric, *more)}[$__range])")

    def quantile(self, quantile: float, histogram: str, by: str = "") -> str:
        buckets = self.rate(f"{histogram}_bucket", f"le, {by}" if by else "le")
        return f"histogram_quantile({quantile}, {buckets})"


def aggregate(operator: str, by: str, vector: str) -> str:
    return f"{operator} by ({by}) ({vector})" if by else f"{operator}({vector})"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def some(vector: str) -> str:
    """Without what is 0: kinds of failures that have not come up."""
    return f"{vector} > 0"


def named(vector: str, label: str, otherwise: str) -> str:
    """Series without the label get this value of it: a legend would leave them without a name."""
    return f'label_replace({vector}, "{label}", "{otherwise}", "{label}", "")'


def share(part: str, whole: str) -> str:
    """Of two sums without labels: 0 where there is nothing of `part` yet, and `whole` is there."""
    return f"({part} or {whole} * 0) / {whole}"


_SERVICE = ('namespace=~"$namespace"', 'inference_service=~"$service"')
_ABOUT_SERVICE = ('service_namespace=~"$namespace"', 'inference_service=~"$service"')

SERVICE_PODS = Scope(_SERVICE)
"""Engines and routers of the chosen services, for dashboards that choose no pod."""
ROLE_PODS = Scope((*_SERVICE, 'role=~"$role"'))
ENGINES = Scope((*_SERVICE, 'role=~"$role"', 'pod=~"$pod"'))
ROUTERS = Scope((*_SERVICE, 'pod=~"$router"'))
"""The gateway among them, which has no `inference_service`: it is shown where all services are."""
ABOUT_SERVICE = Scope(_ABOUT_SERVICE)
"""What the operator says of the chosen services."""
ABOUT_ROLE = Scope((*_ABOUT_SERVICE, 'role=~"$role"'))
OPERATORS = Scope(('namespace=~"$operator_namespace"', 'pod=~"$operator"'))
