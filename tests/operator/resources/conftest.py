"""Pods as the builders render them for a manifest with these groups of its spec."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles, router_role
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.settings import OperatorSettings

RenderPod = Callable[..., dict[str, Any]]
"""`render(settings, engine={...})`: a pod template; the settings may be left out."""


@pytest.fixture
def engine_template(make_service: Callable[..., InferenceService]) -> RenderPod:
    """Of the first engine role."""

    def render(settings: OperatorSettings | None = None, **spec: Any) -> dict[str, Any]:
        settings, service = settings or OperatorSettings(), make_service(**spec)
        return engine_pod_template(service, engine_roles(service, settings.defaults)[0], settings)

    return render


@pytest.fixture
def router_template(make_service: Callable[..., InferenceService]) -> RenderPod:
    def render(settings: OperatorSettings | None = None, **spec: Any) -> dict[str, Any]:
        settings, service = settings or OperatorSettings(), make_service(**spec)
        deployment = router_deployment(service, router_role(service, settings.defaults), settings)
        template: dict[str, Any] = deployment["spec"]["template"]
        return template

    return render


@pytest.fixture(params=["engine", "router"])
def template(request: pytest.FixtureRequest, engine_template: RenderPod, router_template: RenderPod) -> RenderPod:
    """Of engine and router in turns; `pod={...}` is the role's own group: spec.pod, spec.router.pod."""

    def render(settings: OperatorSettings | None = None, pod: dict[str, Any] | None = None) -> dict[str, Any]:
        if request.param == "engine":
            return engine_template(settings, pod=pod or {})
        return router_template(settings, router={"pod": pod or {}})

    return render
