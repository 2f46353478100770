"""The full set of children of one service, in the order in which they are applied.

A child is changed in its builder under resources/; here is only which children there are.
"""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.revision import revision_of
from kvasir_operator.resources.engine_deployment import engine_deployment
from kvasir_operator.resources.engine_service import engine_service
from kvasir_operator.resources.pod_disruption_budget import pod_disruption_budget
from kvasir_operator.resources.replicas import engine_replicas, router_replicas
from kvasir_operator.resources.router_access import router_role, router_role_binding
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_secret import router_secret
from kvasir_operator.resources.router_service import router_service
from kvasir_operator.resources.service_accounts import engine_service_account, router_service_account
from kvasir_operator.settings import OperatorSettings


def desired_objects(service: InferenceService, settings: OperatorSettings) -> list[dict[str, Any]]:
    """Manifests of every child. Secret, identities and Services come before the pods that use them."""
    return [
        router_secret(service),
        *_engine_objects(service, settings),
        *_router_objects(service, settings),
    ]


def _engine_objects(service: InferenceService, settings: OperatorSettings) -> list[dict[str, Any]]:
    name, role = labels.engine_name(service.name), labels.ROLE_SERVE
    budget = pod_disruption_budget(service, name, role, engine_replicas(service))
    return [
        *([] if service.spec.pod.service_account_name else [engine_service_account(service)]),
        engine_service(service),
        *([] if budget is None else [budget]),
        engine_deployment(service, settings, revision_of(service)),
    ]


def _router_objects(service: InferenceService, settings: OperatorSettings) -> list[dict[str, Any]]:
    name, role = labels.router_name(service.name), labels.ROLE_ROUTER
    budget = pod_disruption_budget(service, name, role, router_replicas(service))
    return [
        router_service_account(service),
        router_role(service),
        router_role_binding(service),
        router_service(service),
        *([] if budget is None else [budget]),
        router_deployment(service, settings),
    ]
