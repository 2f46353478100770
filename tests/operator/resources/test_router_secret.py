"""The Secret by which a service's engines know their router, or the gateway."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.gateways import WITH_GATEWAY

from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.router_secret import derived_secret, router_secret, with_random_value
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
RenderPod = Callable[..., dict[str, Any]]
SETTINGS = OperatorSettings()
BEHIND = {"mode": "gateway"}


def secret_of(service: InferenceService, settings: OperatorSettings = SETTINGS) -> dict[str, Any]:
    secret = router_secret(service, settings)
    assert secret is not None
    return secret


def secret_variable(template: dict[str, Any]) -> dict[str, Any]:
    """Where a container has it from."""
    [container] = template["spec"]["containers"]
    [variable] = [each for each in container["env"] if each["name"] == "KVASIR_ROUTER_SECRET"]
    reference: dict[str, Any] = variable["valueFrom"]["secretKeyRef"]
    return reference


def test_its_value_is_no_part_of_what_is_desired_so_no_pass_and_no_revision_depends_on_it(
    make_service: MakeService,
) -> None:
    secret = secret_of(make_service())

    assert secret == secret_of(make_service())
    assert not {"data", "stringData"} & secret.keys()


def test_it_is_drawn_anew_each_time_it_is_made_and_then_stays(make_service: MakeService) -> None:
    one, other = (with_random_value(secret_of(make_service())) for _ in range(2))

    assert one["stringData"] != other["stringData"]
    assert one["immutable"]


def test_engine_and_router_read_the_key_that_it_has(make_service: MakeService, template: RenderPod) -> None:
    made, reference = with_random_value(secret_of(make_service())), secret_variable(template())

    assert reference["name"] == made["metadata"]["name"]
    assert [reference["key"]] == list(made["stringData"])


def test_what_the_gateway_shows_is_an_hmac_of_the_services_name() -> None:
    # printf 'models/llama' | openssl dgst -sha256 -hmac 'gateway-secret'
    expected = "fa2e234b1ad1d6aa0e4d87d1c8e4a96ab303bc746f887ecb0282a7576ba9bc16"
    assert derived_secret("gateway-secret", "models", "llama") == expected


def test_engines_behind_the_gateway_read_what_it_shows(make_service: MakeService, engine_template: RenderPod) -> None:
    secret = secret_of(make_service(router=BEHIND), WITH_GATEWAY)
    reference = secret_variable(engine_template(WITH_GATEWAY, router=BEHIND))

    assert secret["stringData"] == {"secret": derived_secret("gateway-secret", "models", "llama")}
    assert (reference["name"], reference["key"]) == (secret["metadata"]["name"], "secret")
    assert secret["immutable"]


def test_another_secret_of_the_gateways_is_another_object_and_so_another_revision(make_service: MakeService) -> None:
    rotated = dataclasses.replace(WITH_GATEWAY, gateway_secret="another")
    names = {
        secret_of(make_service(router=router), settings)["metadata"]["name"]
        for router in (BEHIND, {})
        for settings in (WITH_GATEWAY, rotated)
    }

    assert len(names) == 3
    assert "llama-router" in names


def test_the_name_fits_and_shows_nothing_of_the_value(make_service: MakeService) -> None:
    secret = secret_of(make_service(name="l" * 63, router=BEHIND), WITH_GATEWAY)
    name, [value] = secret["metadata"]["name"], secret["stringData"].values()

    assert len(name) <= 63
    assert name.rpartition("-")[2] not in value


def test_without_a_gateway_there_is_none_and_engines_wait_for_it(
    make_service: MakeService, engine_template: RenderPod
) -> None:
    assert router_secret(make_service(router=BEHIND), SETTINGS) is None
    assert secret_variable(engine_template(SETTINGS, router=BEHIND))["name"] == "llama-gateway"


@pytest.mark.parametrize("router", [{}, BEHIND])
def test_no_setting_shows_the_gateways_secret(make_service: MakeService, router: dict[str, Any]) -> None:
    assert "gateway-secret" not in repr(WITH_GATEWAY)
    assert "gateway-secret" not in str(secret_of(make_service(router=router), WITH_GATEWAY))
