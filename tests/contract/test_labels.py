"""The operator labels the engines' Services, Kubernetes copies that onto their slices, and the router finds those."""

from pathlib import Path
from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.desired.objects import CurrentRevision, desired_objects, desired_service
from kvasir_operator.settings import OperatorSettings
from kvasir_router.endpoints import slices
from kvasir_router.endpoints.address import Role

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def test_the_names_are_the_same() -> None:
    assert slices.SERVICE_LABEL == labels.SERVICE_LABEL
    assert slices.ROLE_LABEL == labels.ROLE_LABEL
    assert slices.REVISION_LABEL == labels.REVISION_LABEL
    assert slices.TRAFFIC_WEIGHT_LABEL == labels.TRAFFIC_WEIGHT
    assert set(Role) == {labels.ROLE_SERVE, labels.ROLE_PREFILL, labels.ROLE_DECODE}
    assert slices.label_selector("llama") == (
        f"{labels.SERVICE_LABEL}=llama,{labels.ROLE_LABEL} notin ({labels.ROLE_ROUTER})"
    )


def test_the_engines_services_carry_them() -> None:
    (service,) = load_manifests(QUICKSTART).services
    rendered = desired_objects(service, OperatorSettings())
    found = [child["metadata"]["labels"] for child in rendered if child["kind"] == "Service"]
    assert {each[slices.SERVICE_LABEL] for each in found} == {service.name}
    assert any(each[slices.ROLE_LABEL] in set(Role) for each in found)


def test_a_canarys_role_revision_and_weight_are_read_off_its_slices() -> None:
    (service,) = load_manifests(QUICKSTART).services
    wanted = desired_service(service, OperatorSettings())
    objects = wanted.objects(CurrentRevision(wanted.revision, 2, wanted.replicas, traffic_weight=10))
    (headless,) = [each for each in objects if each["kind"] == "Service" and labels.REVISION_LABEL in _labels(each)]
    endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"kind": "Pod", "uid": "u"}}
    ports = [{"name": "http", "port": 8000}]
    copied = {"metadata": {"name": "s", "labels": _labels(headless)}, "ports": ports, "endpoints": [endpoint]}
    (address,) = slices.addresses_of([copied], "http")
    assert (address.role, address.revision, address.traffic_weight) == (Role.SERVE, wanted.revision, 10.0)


def _labels(obj: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = obj["metadata"]["labels"]
    return found
