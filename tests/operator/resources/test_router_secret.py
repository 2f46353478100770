"""The Secret by which a service's engines know its router."""

from collections.abc import Callable
from typing import Any

from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.router_secret import router_secret, with_random_value

MakeService = Callable[..., InferenceService]
RenderPod = Callable[..., dict[str, Any]]


def test_its_value_is_no_part_of_what_is_desired_so_no_pass_and_no_revision_depends_on_it(
    make_service: MakeService,
) -> None:
    secret = router_secret(make_service())

    assert secret == router_secret(make_service())
    assert not {"data", "stringData"} & secret.keys()


def test_it_is_drawn_anew_each_time_it_is_made_and_then_stays(make_service: MakeService) -> None:
    one, other = (with_random_value(router_secret(make_service())) for _ in range(2))

    assert one["stringData"] != other["stringData"]
    assert one["immutable"]


def test_engine_and_router_read_the_key_that_it_has(make_service: MakeService, template: RenderPod) -> None:
    made = with_random_value(router_secret(make_service()))
    [container] = template()["spec"]["containers"]
    [variable] = [each for each in container["env"] if each["name"] == "KVASIR_ROUTER_SECRET"]
    reference = variable["valueFrom"]["secretKeyRef"]

    assert reference["name"] == made["metadata"]["name"]
    assert [reference["key"]] == list(made["stringData"])
