"""What a pass found beside its pods: each problem with its reason, and what to do."""

from kvasir_operator.apply.apply import Refusal
from kvasir_operator.desired.unsupported import UnsupportedFeature
from kvasir_operator.errors import KubeForbiddenError
from kvasir_operator.kube.kinds import SERVICE, ObjectKey
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


def test_a_service_that_is_as_it_should_be_has_none() -> None:
    assert find_problems([], [], [], []) == []
