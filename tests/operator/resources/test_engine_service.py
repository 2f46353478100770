"""The Service of an engine role's revision, whose EndpointSlices the router reads."""

from collections.abc import Callable
from typing import Any

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.resources.engine_deployment import engine_deployment
from kvasir_operator.resources.services import engine_service
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


def render(service: InferenceService, revision: str = "aaaaaaaaaa", weight: int | None = None) -> dict[str, Any]:
    [role, *_] = engine_roles(service, SETTINGS.defaults)
    return engine_service(service, role.name, revision, weight, is_grouped=role.is_grouped)


def test_it_selects_the_pods_of_its_revision_alone(make_service: MakeService) -> None:
    service = make_service()
    [role] = engine_roles(service, SETTINGS.defaults)
    pods = {
        revision: engine_deployment(service, role, revision, 1, SETTINGS)["spec"]["template"]["metadata"]["labels"]
        for revision in ("aaaaaaaaaa", "bbbbbbbbbb")
    }
    selector = render(service)["spec"]["selector"]

    assert selector.items() <= pods["aaaaaaaaaa"].items()
    assert not selector.items() <= pods["bbbbbbbbbb"].items()


def test_the_router_finds_service_role_and_revision_in_its_labels(make_service: MakeService) -> None:
    labels = render(make_service())["metadata"]["labels"]

    assert labels["serving.kvasir.dev/service"] == "llama"
    assert labels["serving.kvasir.dev/role"] == "serve"
    assert labels["serving.kvasir.dev/revision"] == "aaaaaaaaaa"


def test_a_canarys_share_of_the_requests_is_a_label_which_its_slices_get_too(make_service: MakeService) -> None:
    for weight in (0, 10):
        metadata = render(make_service(), weight=weight)["metadata"]
        assert metadata["labels"]["serving.kvasir.dev/traffic-weight"] == str(weight)
        assert metadata["annotations"] == {"serving.kvasir.dev/traffic-weight": str(weight)}
    metadata = render(make_service())["metadata"]
    assert "serving.kvasir.dev/traffic-weight" not in metadata["labels"]
    assert "annotations" not in metadata


def test_it_has_the_addresses_of_ready_pods_of_either_family(make_service: MakeService) -> None:
    spec = render(make_service())["spec"]

    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", False)
    assert spec["ipFamilyPolicy"] == "PreferDualStack"


def test_deployment_and_service_share_a_name_that_fits(make_service: MakeService) -> None:
    service = make_service(name="l" * 63)
    [role] = engine_roles(service, SETTINGS.defaults)
    names = {
        child["metadata"]["name"]
        for child in (render(service), engine_deployment(service, role, "aaaaaaaaaa", 1, SETTINGS))
    }

    assert [len(name) <= 63 for name in names] == [True]
