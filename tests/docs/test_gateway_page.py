"""docs/gateway.md says what routers of a hundred idle services ask for."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvasir_operator.api.defaults import GatewayDefaults, InstallationDefaults
from kvasir_operator.api.parse import parse_service
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.render import render_services
from kvasir_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gateway.md").read_text()
GATEWAY: dict[str, Any] = yaml.safe_load((ROOT / "charts/kvasir/values.yaml").read_text())["gateway"]
GIB = 2**30


def asked(replicas: int, resources: dict[str, dict[str, str]]) -> tuple[float, ...]:
    """Pods, CPUs and GiB; a limit is requested too where no other request is written."""
    requests = resources["limits"] | resources["requests"]
    return replicas, *(
        replicas * Quantity(requests[name]).amount / unit for name, unit in (("cpu", 1), ("memory", GIB))
    )


def routers(mode: str) -> tuple[float, ...]:
    """Of one service at zero."""
    spec = {"model": {"source": "pvc://claim"}, "router": {"mode": mode}, "replicas": 0}
    service = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "a"}}
    defaults = InstallationDefaults(gateway=GatewayDefaults("kvasir-system", "kvasir-gateway", {"app": "gateway"}))
    settings = OperatorSettings(defaults=defaults, gateway_secret="secret")
    documents = yaml.safe_load_all(render_services([parse_service({**service, "spec": spec})], settings).text)
    specs = [each["spec"] for each in documents if each["kind"] == "Deployment" and each["spec"]["replicas"]]
    found = [asked(each["replicas"], each["template"]["spec"]["containers"][0]["resources"]) for each in specs]
    return found[0] if found else (0.0, 0.0, 0.0)


@pytest.mark.parametrize("mode", ["gateway", "dedicated"])
def test_the_page_says_what_routers_of_a_hundred_idle_services_ask_for(mode: str) -> None:
    shared = asked(GATEWAY["replicas"], GATEWAY["resources"]) if mode == "gateway" else (0.0, 0.0, 0.0)
    of_all = [one + 100 * own for one, own in zip(shared, routers(mode), strict=True)]
    [row] = re.findall(rf"^\| `mode: {mode}` .*\| (\d+) \| (\d+) \| (\d+) GiB \|$", PAGE, re.MULTILINE)
    assert [float(number) for number in row] == of_all
