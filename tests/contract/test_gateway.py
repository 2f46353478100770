"""What the operator says of services behind the gateway is what the gateway does."""

from datetime import UTC, datetime
from pathlib import Path

from tests.router.kube_objects import manifest

from kvasir_operator.api import labels
from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, ServiceKey
from kvasir_operator.observe.model_names import ModelNames, claimed_names
from kvasir_operator.resources import router_secret
from kvasir_operator.settings import OperatorSettings
from kvasir_router.config import GATEWAY_SECRET_VARIABLE, RouterConfig
from kvasir_router.endpoints import inference_services
from kvasir_router.endpoints.gateway_source import ENGINE_PORT
from kvasir_router.endpoints.inference_services import InferenceService
from kvasir_router.endpoints.slices import ROLE_LABEL
from kvasir_router.gateway import derived_secret

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SERVICES = (
    manifest("b", created="2026-11-20T10:00:00Z", aliases=("shared", "b-only")),
    manifest("a", created="2026-11-20T10:00:01Z", aliases=("shared",), adapters=("sql",)),
    manifest("c", created="2026-11-20T10:00:01Z", namespace="later", model="sql", aliases=("c",)),
    manifest("d", mode="dedicated", aliases=("shared", "sql")),
)


def test_a_services_engines_and_the_gateway_have_the_same_secret() -> None:
    assert labels.GATEWAY_SECRET_ENV == GATEWAY_SECRET_VARIABLE
    assert router_secret.derived_secret("s3", "models", "llama") == derived_secret("s3", "models/llama")


def test_both_read_the_same_names_and_give_them_to_the_same_services() -> None:
    names = ModelNames()
    for service in SERVICES:
        names.put(service)
    read = [found for service in SERVICES if (found := InferenceService.read(service)) is not None]
    owners = inference_services.claims(read)
    assert len(read) == 3
    for found in read:
        key = ServiceKey(*found.key)
        assert names.names(key) == found.names
        lost = {name: tuple(owner) for name, owner in names.taken(key).items()}
        assert lost == {name: owners[name] for name in found.names if owners[name] != found.key}


def test_a_manifest_that_the_operator_knows_of_is_read() -> None:
    (found,) = [InferenceService.read(one) for one in SERVICES[:1]]
    assert found is not None
    assert found.names == claimed_names(SERVICES[0])
    assert found.created == datetime(2026, 11, 20, 10, tzinfo=UTC)


def test_the_kind_is_the_operators() -> None:
    group, version = labels.API_VERSION.split("/")
    assert (group, version) == (inference_services.GROUP, inference_services.VERSION)
    assert inference_services.PLURAL == INFERENCE_SERVICE.plural == labels.PLURAL


def test_the_engines_services_have_the_port_that_the_gateway_asks() -> None:
    (service,) = load_manifests(QUICKSTART).services
    rendered = desired_objects(service, OperatorSettings())
    engines = [
        one for one in rendered if one["kind"] == "Service" and one["metadata"]["labels"].get(ROLE_LABEL) == "serve"
    ]
    assert engines
    for one in engines:
        assert ENGINE_PORT in {port["name"] for port in one["spec"]["ports"]}


def test_the_gateway_takes_the_policies_of_manifests() -> None:
    """Flags and manifests have the same choices."""
    for policy in ("finishTime", "roundRobin", "sessionAffinity"):
        found = InferenceService.read(manifest("a", policy=policy))
        assert found is not None
        RouterConfig(gateway=("*",), policy=found.policy)
