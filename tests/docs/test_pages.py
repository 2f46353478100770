"""The pages under docs/ hold: manifests and values parse, named files are there, every reason is explained."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from lupa.lua51 import LuaRuntime

from kvasir_operator.api import labels
from kvasir_operator.api.conditions import Condition, ConditionType, Reason, carry_over
from kvasir_operator.desired.unsupported import unsupported_features
from kvasir_operator.manifests import load_services

ROOT = Path(__file__).parents[2]
INSTALL = (ROOT / "docs" / "install.md").read_text()
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
SCHEMA = json.loads((ROOT / "charts" / "kvasir" / "values.schema.json").read_text())
YAML_BLOCKS = re.findall(r"```yaml\n(.*?)```", INSTALL, re.DOTALL)
VALUES = [block for block in YAML_BLOCKS if block.startswith("# values.yaml")]
BEHIND_GATEWAY = [block for block in YAML_BLOCKS if "mode: gateway" in block]
MANIFESTS = [block for block in YAML_BLOCKS if block not in VALUES + BEHIND_GATEWAY]


def test_every_reason_is_explained_and_no_other() -> None:
    explained = re.findall(r"^### (\w+)$", TROUBLESHOOTING, re.MULTILINE)
    assert sorted(explained) == sorted(reason.value for reason in Reason)


def test_every_condition_is_explained() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TROUBLESHOOTING, re.MULTILINE) == [each.value for each in ConditionType]


@pytest.mark.parametrize("block", VALUES)
def test_the_chart_takes_the_values_of_the_page(block: str) -> None:
    values: dict[str, Any] = yaml.safe_load(block)
    jsonschema.validate(values, SCHEMA)
    assert values["images"]["registry"], "values that name no registry are refused"


def test_the_service_of_the_page_holds_and_asks_for_what_the_page_has_made(tmp_path: Path) -> None:
    (tmp_path / "page.yaml").write_text("---\n".join(MANIFESTS))
    documents = list(yaml.safe_load_all((tmp_path / "page.yaml").read_text()))
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(documents[0]))
    [service] = load_services(tmp_path / "service.yaml")
    [secret] = [document for document in documents if document["kind"] == "Secret"]
    keys = service.spec.router.api_keys_secret_ref
    assert keys is not None
    assert (keys.name, service.namespace) == (secret["metadata"]["name"], secret["metadata"]["namespace"])
    profiles = {name for block in VALUES for name in yaml.safe_load(block).get("profiles", {})}
    assert service.spec.resources is not None
    assert service.spec.resources.profile in profiles


def test_the_service_behind_the_gateway_holds_and_the_gateway_is_one_of_the_page(tmp_path: Path) -> None:
    [block] = BEHIND_GATEWAY
    (tmp_path / "service.yaml").write_text(block)
    [service] = load_services(tmp_path / "service.yaml")
    [gateway] = [values["gateway"] for values in map(yaml.safe_load, VALUES) if "gateway" in values]
    assert service.is_behind_gateway
    assert gateway["enabled"]
    assert f"create secret generic {gateway['apiKeysSecret']} " in INSTALL


def health_check() -> tuple[str, str]:
    """Of Argo CD: its key in the ConfigMap, and its Lua."""
    [block] = [block for block in MANIFESTS if "resource.customizations.health" in block]
    [(key, lua)] = yaml.safe_load(block)["data"].items()
    return key, lua


def test_the_health_check_for_argo_cd_reads_what_a_service_has() -> None:
    key, lua = health_check()
    assert key == f"resource.customizations.health.{labels.GROUP}_{labels.KIND}"
    assert set(re.findall(r"\bconditions\.(\w+)", lua)) == {ConditionType.READY, ConditionType.DEGRADED}
    assert set(re.findall(r'reason == "(\w+)"', lua)) == {Reason.SUSPENDED}


GENERATION = 2
AS_EXPECTED = Condition(ConditionType.DEGRADED, False, Reason.AS_EXPECTED, "")
CRASHING = Condition(ConditionType.DEGRADED, True, Reason.CRASH_LOOPING, "it ends with an error")
SERVING = Condition(ConditionType.READY, True, Reason.SERVING, "2 of 2 replicas serve")
IDLE = Condition(ConditionType.READY, True, Reason.IDLE, "no replicas are wanted")
LOADING = Condition(ConditionType.READY, False, Reason.LOADING_MODEL, "it loads")
SUSPENDED = Condition(ConditionType.READY, False, Reason.SUSPENDED, "spec.suspend is true")
NOT_SEEN = "the operator has not seen this manifest yet"
Health = tuple[str, str]
HEALTH: dict[str, tuple[int | None, list[Condition], Health]] = {
    "no status": (None, [], ("Progressing", NOT_SEEN)),
    "no conditions": (GENERATION, [], ("Progressing", NOT_SEEN)),
    "of the generation before": (GENERATION - 1, [SERVING, AS_EXPECTED], ("Progressing", NOT_SEEN)),
    "starting": (GENERATION, [LOADING, AS_EXPECTED], ("Progressing", "it loads")),
    "serving": (GENERATION, [SERVING, AS_EXPECTED], ("Healthy", "2 of 2 replicas serve")),
    "asleep": (GENERATION, [IDLE, AS_EXPECTED], ("Healthy", "no replicas are wanted")),
    "suspended": (GENERATION, [SUSPENDED, CRASHING], ("Suspended", "spec.suspend is true")),
    "degraded": (GENERATION, [SERVING, CRASHING], ("Degraded", "it ends with an error")),
}


@pytest.mark.parametrize(("generation", "conditions", "health"), HEALTH.values(), ids=HEALTH)
def test_argo_cd_judges_a_service_by_its_conditions(
    generation: int | None, conditions: list[Condition], health: Health
) -> None:
    service: dict[str, Any] = {"metadata": {"generation": GENERATION}}
    if generation is not None:
        shown = carry_over([], conditions, generation, "2026-11-22T12:00:00Z")
        service["status"] = {"observedGeneration": generation} | ({"conditions": shown} if shown else {})
    lua = LuaRuntime()  # 5.1, the language of Argo CD's own interpreter
    lua.globals().obj = lua.table_from(service, recursive=True)
    answer = lua.execute(health_check()[1])
    assert (answer["status"], answer["message"]) == health


def test_requests_have_a_key_of_the_page() -> None:
    [secret] = [document for block in MANIFESTS if (document := yaml.safe_load(block))["kind"] == "Secret"]
    keys = [key for value in secret["stringData"].values() for key in value.split()]
    used = re.findall(r"Authorization: Bearer (\S+)'", INSTALL)
    assert used
    assert set(used) <= set(keys)


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TOP = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(rf"`((?:{TOP})/[\w./-]+)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_reading_order_names_every_room_of_the_operator_and_files_that_are_there() -> None:
    path = (
        (ROOT / "README.md")
        .read_text()
        .partition("**A manifest becomes pods.**")[2]
        .partition("`kvasir-operator local`")[0]
    )
    package = ROOT / "operator" / "kvasir_operator"
    rooms = {room.name for room in package.iterdir() if (room / "__init__.py").exists()} - {"local"}
    assert [room for room in sorted(rooms) if f"{room}/" not in path] == []
    named = re.findall(r"`(?:operator/kvasir_operator/)?([a-z_]+/[a-z_]+\.py)`", path)
    assert named
    assert [name for name in named if not (package / name).exists()] == []


def test_the_service_from_a_hub_holds_and_has_the_secret_of_the_page(tmp_path: Path) -> None:
    [block] = [block for block in MANIFESTS if "source: hf://" in block]
    (tmp_path / "service.yaml").write_text(block)
    [service] = load_services(tmp_path / "service.yaml")
    secret = service.spec.model.secret_ref
    assert secret is not None
    assert f"create secret generic {secret.name} --from-literal=HF_TOKEN=" in INSTALL
    assert unsupported_features(service, (1, 30)) == []
