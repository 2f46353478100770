"""What a pass found beside its pods: each problem with its reason, and what to do."""

import pytest

from kvasir_operator.apply.apply import Refusal
from kvasir_operator.desired.unsupported import UnsupportedFeature
from kvasir_operator.errors import KubeApiError, KubeForbiddenError, ObjectRefusedError, ServerFailedError
from kvasir_operator.kube.kinds import SERVICE, ObjectKey, ServiceKey
from kvasir_operator.observe.model_names import GatewayState
from kvasir_operator.status.problems import find_problems

KEY = ObjectKey(SERVICE, "llama-router")


def test_each_problem_has_its_reason_and_names_what_it_is_about() -> None:
    found = find_problems(
        [UnsupportedFeature("spec.engine.adapters", "not yet")],
        [Refusal(KEY, KubeForbiddenError("exceeded quota: services", 403))],
        [KEY],
        ["Deployment d: hpa keeps writing spec.replicas"],
    )
    assert [(each.reason, each.message) for each in found] == [
        ("UnsupportedFeature", "spec.engine.adapters: not yet"),
        ("QuotaExceeded", "Service llama-router: exceeded quota: services"),
        (
            "NameTaken",
            "Service llama-router exists and belongs to somebody else: delete or rename it, or rename the service",
        ),
        ("FieldsContested", "Deployment d: hpa keeps writing spec.replicas"),
    ]


@pytest.mark.parametrize(
    "error",
    [
        ObjectRefusedError("spec.template.spec.volumes[1]: Required value: must specify a volume type", 422),
        ServerFailedError('.spec.template.spec.volumes[name="model"].image: field not declared in schema', 500),
    ],
)
def test_an_api_server_without_image_volumes_is_told_apart_from_a_broken_manifest(error: KubeApiError) -> None:
    [found] = find_problems([], [Refusal(KEY, error)], [], [])
    assert found.message.endswith(
        "oci:// needs image volumes: Kubernetes 1.35, or 1.31 with the feature gate ImageVolume)"
    )
    [other] = find_problems([], [Refusal(KEY, ObjectRefusedError("spec.replicas: Invalid value", 422))], [], [])
    assert "oci://" not in other.message


def test_a_service_that_is_as_it_should_be_has_none() -> None:
    assert find_problems([], [], [], []) == []


def test_what_keeps_the_gateway_from_a_service_is_told() -> None:
    owner = ServiceKey("models", "older")
    gateway = GatewayState(is_ready=False, names=("a", "b", "c"), taken={"a": owner, "c": owner})
    assert [(each.reason, each.message) for each in find_problems([], [], [], [], gateway)] == [
        ("GatewayNotReady", "no pod of the gateway is ready"),
        (
            "ModelNameTaken",
            "behind the gateway 'a' belongs to service models/older, 'c' belongs to service models/older, which was "
            "created first: choose another name or alias, or rename that one's",
        ),
    ]
    assert find_problems([], [], [], [], GatewayState(is_ready=True, names=("a",))) == []
