"""Every value of the chart has a description and a schema, and the README shows them as they are."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts.values_schema import text_of, whole
from charts.values_table import CHART, documented_values, with_table
from tests.charts import chart_values
from tests.charts.chart_values import SCHEMA, SCHEMA_TEXT, VALIDATOR, VALUES, VALUES_TEXT, overlaid, validate

from kvasir_operator.api.defaults import InstallationDefaults
from kvasir_operator.api.parse import parse_group
from kvasir_operator.api.service_rules import CPU_RULE
from kvasir_operator.cli import main
from kvasir_operator.errors import InvalidManifestError
from kvasir_operator.settings import ABOVE_ZERO, OperatorSettings
from kvasir_router.cli import parse_arguments
from kvasir_router.config import RouterConfig

SOME_SERVICE = CHART.parents[1] / "examples" / "quickstart.yaml"
DEFINITIONS = {"definitions": SCHEMA["definitions"]}
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    else:
        yield path


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return schema if reference is None else SCHEMA["definitions"][reference.rpartition("/")[2]]


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an object whose keys are known."""
    schema = resolved(schema)
    for key, below in schema.get("properties", {}).items():
        yield from objects(below, f"{path}.{key}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")
    if "properties" in schema:
        yield path, schema


def test_every_value_is_described() -> None:
    described = {tuple(value.path.split(".")) for value in documented_values(VALUES_TEXT)}
    undescribed = [path for path in leaves(VALUES) if not any(path[:end] in described for end in range(len(path) + 1))]
    assert undescribed == []


def test_the_readme_has_the_table_of_the_values() -> None:
    readme = (CHART / "README.md").read_text()
    assert readme == with_table(readme, VALUES_TEXT), "run charts/values_table.py"


def test_the_schema_knows_the_same_keys_as_the_values() -> None:
    for path, schema in objects(SCHEMA):
        if "[]" in path or path.endswith("ecurityContext"):  # whose fields are Kubernetes'
            continue
        values = VALUES
        for key in path.split(".")[1:]:
            values = values.get(key, {})
        if values == {}:
            continue  # for the user to fill
        assert set(values) == set(schema["properties"]) - ({"global", "enabled"} if not path else set()), path


def test_the_schema_refuses_unknown_keys_everywhere() -> None:
    assert [path for path, schema in objects(SCHEMA) if schema.get("additionalProperties") is not False] == []


def test_the_schema_has_what_is_made_of_the_operators_own_classes_and_flags() -> None:
    assert text_of(whole(SCHEMA, VALUES)) + "\n" == SCHEMA_TEXT, "run make generate"


POD: dict[str, Any] = {
    "image": "registry.example/engine:1",
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [
        {"key": "gpu", "operator": "Equal", "value": "a", "effect": "NoExecute", "tolerationSeconds": 3},
        {"key": "gpu", "operator": "Exists"},
    ],
    "affinity": {"nodeAffinity": {}},
    "topologySpread": "auto",
    "priorityClassName": "high",
    "serviceAccountName": "engine",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "imagePullSecrets": [{"name": "mirror"}],
    "securityContext": {"fsGroup": 1, "seccompProfile": None},
    "volumes": [{"mountPath": "/etc/ca", "configMap": {"name": "ca"}}],
    "labels": {"team": "a"},
    "annotations": {"team": "a b"},
    "env": [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
        {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ],
}
ENGINE: dict[str, Any] = {
    "pod": POD,
    "resources": {
        "accelerator": "nvidia.com/gpu",
        "maxDevices": 8,
        "cpu": 4,
        "memory": "8Gi",
        "sharedMemory": "1Gi",
        "extra": {"rdma/ib": "1"},
        "claims": [{"name": "gpu", "resourceClaimName": "shared"}],
    },
}
ROUTER: dict[str, Any] = {"pod": {}, "resources": {"cpu": "1", "memory": "1Gi", "cpuLimit": 2}}
GIVEN: dict[str, Any] = {
    "podDefaults": {"engine": ENGINE, "router": ROUTER},
    "profiles": {
        "h100": {"pod": {"env": [{"name": "A", "value": "1"}]}, "resources": {"cpu": 1, "extra": {"rdma/ib": 1}}}
    },
    "networkPolicies": {"metricsFrom": [{"podLabels": {"app": "prometheus"}, "namespaceLabels": {"a": "b"}}]},
    "monitoring": {"labels": {"release": "prometheus"}, "interval": "15s"},
}
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        2,
        1.5,
        10**12,
        "",
        " ",
        "1",
        "-1",
        "1.5",
        "300s",
        "5 Gi",
        "true",
        "null",
        "R&D",
        "/tmp",
        "etc/ca",
    ),
    *("Exists", "Exist", "auto", "a" * 300, [], {}, [1], ["a"], {"a": 1}, {"serving.kvasir.dev/a": "b"}, {"name": "x"}),
)


def steps(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """To every value within, and to one key more of each map."""
    yield path
    if isinstance(value, dict):
        yield (*path, "unheardOf")
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from steps(below, (*path, key))


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    made = within = copy.deepcopy(value)
    for step in path[:-1]:
        within = within[step]
    within[path[-1]] = new
    return made


def as_pod_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """As the chart writes them for the operator."""
    defaults = {**values.get("podDefaults", {}), "profiles": values.get("profiles", {})}
    if "networkPolicies" in values:
        defaults["networkPeers"] = {"metrics": values["networkPolicies"].get("metricsFrom", [])}
    monitoring = values.get("monitoring", {})
    defaults["podMonitors"] = {key: monitoring[key] for key in ("labels", "interval") if monitoring.get(key)}
    return defaults


@pytest.mark.parametrize("group", GIVEN)
def test_what_the_schema_accepts_the_operator_takes(group: str) -> None:
    """Each value of each field of the manifest in turn is something odd."""
    validator = VALIDATOR.evolve(schema={**SCHEMA["properties"][group], "definitions": SCHEMA["definitions"]})
    given = overlaid(VALUES[group], GIVEN[group])
    assert validator.is_valid(given)
    candidates = (changed(given, path, odd) for path in steps(GIVEN[group]) if path for odd in ODD)
    accepted = [values for values in candidates if validator.is_valid(values) and as_pod_defaults({group: values})]
    assert len(accepted) > 10
    for values in accepted:
        try:
            parse_group(InstallationDefaults, as_pod_defaults({group: values}), "")
        except InvalidManifestError as error:
            if CPU_RULE.message not in str(error):  # which templates compare
                pytest.fail(f"{error}")


@pytest.mark.parametrize(
    ("values", "is_valid"),
    [
        ({"enabled": True, "global": {"imageRegistry": "a"}}, True),
        ({"operator": {"extraArgs": ["--retry-max-seconds=60", "--lease-seconds=30"]}}, True),
        ({"operator": {"extraArgs": ["--no-network-policies"]}}, False),  # the template's own
        ({"operator": {"extraArgs": ["--workers=4"]}}, False),
        ({"operator": {"extraArgs": ["--retry-max-seconds=soon"]}}, False),
        ({"operator": {"extraArgs": ["--retry"]}}, False),
        ({"operator": {"workers": 1e9}}, False),
        ({"operator": {"env": [{"name": "A", "value": 1}]}}, False),
        ({"gateway": {"extraArgs": ["--max-connections=16384"]}}, True),
        ({"gateway": {"extraArgs": ["--max-connections"]}}, False),
        ({"gateway": {"extraArgs": ["--max-queue-wait=5m", "--max-body-size=16Mi", "--bytes-per-token=3.50"]}}, True),
        ({"gateway": {"extraArgs": ["--port=8081"]}}, False),
        ({"gateway": {"extraArgs": ["--model=llama"]}}, False),
        ({"prometheus": {"url": "https://user:password@example.com"}}, False),
        ({"prometheus": {"url": "http://["}}, False),
        ({"prometheus": {"url": "http://[fd00::1]:9090/select/0/prometheus"}}, True),
        ({"prometheus": {"tokenSecret": "a", "basicAuthSecret": "b"}}, False),
        ({"prometheus": {"tokenSecret": "", "basicAuthSecret": "b"}}, True),
        ({"proxy": {"httpsProxy": "proxy.example.com:3128"}}, False),
        ({"proxy": {"httpsProxy": "http://user:word@proxy.example.com:3128"}}, True),
        ({"podDefaults": {"engine": {"pod": {"securityContext": {"fsGruop": 2000}}}}}, False),
        ({"podDefaults": {"engine": {"pod": {"affinity": {"nodeAfinity": {}}}}}}, False),
        ({"monitoring": {"interval": "5m1h"}}, False),
        ({"images": {"pullPolicy": None}}, False),
        ({"operator": {"workers": None}}, False),
        ({"operator": {"podSecurityContext": {"seccompProfile": None}}}, True),
        ({"profiles": {"h100": {"resources": {"cpu": 4}}}}, True),
        ({"images": {"registry": "registry.example.com/a b"}}, False),
    ],
    ids=str,
)
def test_the_schema_refuses_by_its_place_what_would_stop_a_pod(values: dict[str, Any], is_valid: bool) -> None:
    assert chart_values.is_valid(values) is is_valid


ODD_TEXTS = (
    *("0", "1", "2", "3", "9", "10", "65535", "65536", "70000", "1000000", "1000001", "1000000000", "1000000001"),
    *("9" * 6, "9" * 9, "9" * 18, "9" * 30, "9" * 400, "-1", "+1", "01", "1e3", "1_000", "0x1", "nan", "inf"),
    *("0.0", "0.5", "0.50", "1.5", ".5", "1.", f"0.{'0' * 400}1", f"1.{'9' * 30}", "0.000000001"),
    *("0s", "5s", "0ms", "0.001ms", "5m", "1.5h", "99999h", "100000h", "9999999m", "99999999m", "5 s", "5d", "1h30m"),
    *("0Mi", "16Mi", "16mi", "999999999Gi", "9999999999Gi", "1.5Gi", "1T"),
    *("", " ", "auto", "on", "off", "true", "debug", "info", "kvasir", "vllm", "roundRobin", "random"),
    *("*", "https://a.example", "https://a.example/b", "a.example", "5557:5558", "a:1"),
)
GATEWAY_FLAGS = ["serve", "--gateway=*", "--kv-events=5557:5657", "--peers=gateway-peers:5559"]
# One body is at most as large as all, and the first wait at most as long as the longest: templates compare them.
BESIDE = {
    "--max-held-body-size": ["--max-body-size=0"],
    "--max-body-size": [f"--max-held-body-size={2**60}"],
    "--retry-max-seconds": [f"--retry-initial-seconds={ABOVE_ZERO}"],
    "--retry-initial-seconds": [f"--retry-max-seconds={10**6}"],
}


def beside(flag: str) -> list[str]:
    return BESIDE.get(flag.partition("=")[0], [])


FLAG_READERS: dict[str, tuple[type, Callable[[str], Any]]] = {
    "operator": (OperatorSettings, lambda flag: main(["render", flag, *beside(flag), str(SOME_SERVICE)])),
    "gateway": (RouterConfig, lambda flag: parse_arguments([*GATEWAY_FLAGS, flag, *beside(flag)])),
}


@pytest.mark.parametrize("pod", FLAG_READERS)
def test_the_flags_that_the_schema_accepts_start_the_pod(pod: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, read = FLAG_READERS[pod]
    validator = VALIDATOR.evolve(schema={**SCHEMA["properties"][pod]["properties"]["extraArgs"], **DEFINITIONS})
    flags = (f"--{each.name.replace('_', '-')}={text}" for each in fields(config) for text in ODD_TEXTS)
    accepted = [flag for flag in flags if validator.is_valid([flag])]
    assert len(accepted) > 40
    for flag in accepted:
        assert read(flag) != 2, capsys.readouterr().err


@pytest.mark.parametrize("file", CI_FILES, ids=lambda file: file.stem)
def test_the_schema_accepts_every_ci_file(file: Path) -> None:
    VALIDATOR.check_schema(SCHEMA)
    validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("pod", ["operator", "gateway"])
def test_a_pod_of_the_chart_requests_all_memory_that_it_may_use(pod: str) -> None:
    """By its limit, which Kubernetes takes for the request: so a release that lowers one of them lowers both."""
    resources = VALUES[pod]["resources"]
    assert ("memory" in resources["limits"], "memory" in resources["requests"]) == (True, False)
