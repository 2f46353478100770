"""`render`: the YAML that the cluster would get, the same text for the same manifests."""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from kvasir_operator.api.manifests import PlainDumper
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.desired.unsupported import unsupported_features
from kvasir_operator.settings import OperatorSettings


@dataclass(frozen=True)
class Rendered:
    """`text`: YAML documents in apply order. `warnings`: what the manifests ask for and this release does not do."""

    text: str
    warnings: tuple[str, ...]


def render_services(services: Sequence[InferenceService], settings: OperatorSettings) -> Rendered:
    """All children of all services, but for owner references, as a file has no uid, and the values of Secrets."""
    children = [child for service in services for child in desired_objects(service, settings)]
    objects = [{key: value for key, value in child.items() if key != "stringData"} for child in children]
    has_gateway, defaults = settings.defaults.gateway is not None, settings.defaults
    warnings = [
        f"{service.name}: {feature}"
        for service in services
        for feature in unsupported_features(service, has_gateway=has_gateway, roles=engine_roles(service, defaults))
    ]
    return Rendered(yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False, explicit_start=True), tuple(warnings))
