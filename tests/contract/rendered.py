"""What the other two programs read from the flags that the operator writes."""

import re
from collections.abc import Mapping
from typing import Any

from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.roles import engine_roles, router_role
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.settings import OperatorSettings
from kvasir_router.cli import parse_arguments
from kvasir_router.config import RouterConfig
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.flags import Parser, add_flags, config_from

SETTINGS = OperatorSettings()
# What a pod would be told of itself.
FIELDS = {
    "KVASIR_NODE_RANK": "1",
    "KVASIR_GROUP": "llama-serve-0123456789-0",
    "KVASIR_REVISION": "0123456789",
    "POD_IP": "10.0.0.7",
}


def service_with(**spec: Any) -> InferenceService:
    kind = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}
    return parse_service({**kind, "metadata": {"name": "llama", "namespace": "models"}, "spec": spec})


def runtime_configs(service: InferenceService) -> list[RuntimeConfig]:
    """Of a pod of each engine role; of a group the second."""
    templates = [engine_pod_template(service, role, SETTINGS) for role in engine_roles(service, SETTINGS.defaults)]
    return [runtime_config(template, FIELDS) for template in templates]


def runtime_config(template: dict[str, Any], fields: Mapping[str, str]) -> RuntimeConfig:
    """Of the pod that is told `fields` of itself."""
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser)
    return config_from(parser.parse_all(arguments(template, "kvasir-runtime", fields)[1:]))


def router_config(service: InferenceService) -> RouterConfig:
    deployment = router_deployment(service, router_role(service, SETTINGS.defaults), SETTINGS)
    return parse_arguments(arguments(deployment["spec"]["template"], "kvasir-router"))


def arguments(template: dict[str, Any], program: str, fields: Mapping[str, str] = FIELDS) -> list[str]:
    """Without the program's name, and with `$(NAME)` as a kubelet would have it."""
    [container] = template["spec"]["containers"]
    named = {variable["name"] for variable in container["env"]}
    name, *rest = [re.sub(r"\$\((\w+)\)", lambda found: fields[found[1]], each) for each in container["command"]]
    assert named >= {found for each in container["command"] for found in re.findall(r"\$\((\w+)\)", each)}
    assert (name, rest[0]) == (program, "serve")
    return rest
