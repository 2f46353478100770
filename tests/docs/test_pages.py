"""The pages of the documentation hold: manifests and values parse, files are there, every reason is explained."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime
from tests.charts.chart_values import validate

from kvasir_operator.api import labels
from kvasir_operator.api.conditions import Condition, ConditionType, Reason, carry_over
from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.unsupported import unsupported_features

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()
BLOCKS = [
    (page.stem, block) for page in PAGES for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
]
VALUES = [(page, block) for page, block in BLOCKS if block.startswith("# values.yaml")]
SERVICES = [(page, block) for page, block in BLOCKS if "kind: InferenceService" in block]
PARTS = [(page, block) for page, block in BLOCKS if re.search(r"^spec:", block, re.MULTILINE) and "kind:" not in block]
OTHERS = [yaml.safe_load(block) for page, block in BLOCKS if "kind:" in block and (page, block) not in SERVICES]
PROFILES = {name for _, block in VALUES for name in yaml.safe_load(block).get("profiles", {})}


def test_every_reason_is_explained_and_no_other() -> None:
    explained = re.findall(r"^### (\w+)$", TROUBLESHOOTING, re.MULTILINE)
    assert sorted(explained) == sorted(reason.value for reason in Reason)


def test_every_condition_is_explained() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TROUBLESHOOTING, re.MULTILINE) == [each.value for each in ConditionType]


@pytest.mark.parametrize(("page", "block"), VALUES)
def test_the_chart_takes_the_values_of_a_page(page: str, block: str) -> None:
    values: dict[str, Any] = yaml.safe_load(block)
    validate(values)
    assert values["images"]["registry"], "values that name no registry are refused"


def loaded(text: str, folder: Path) -> InferenceService:
    (folder / "service.yaml").write_text(text)
    [service] = load_manifests(folder / "service.yaml").services
    return service


@pytest.mark.parametrize(("page", "block"), SERVICES)
def test_a_service_of_a_page_holds_and_asks_for_what_the_pages_make(page: str, block: str, tmp_path: Path) -> None:
    service = loaded(block, tmp_path)
    blocking = [feature for feature in unsupported_features(service) if feature.is_blocking]
    assert service.is_behind_gateway or blocking == []
    if service.spec.resources is not None and service.spec.resources.profile is not None:
        assert service.spec.resources.profile in PROFILES
    made = {(made["metadata"]["name"], made["metadata"]["namespace"]) for made in OTHERS if made["kind"] == "Secret"}
    keys = service.spec.router.api_keys_secret_ref
    assert keys is None or (keys.name, service.namespace) in made
    secret = service.spec.model.secret_ref
    text = (DOCS / f"{page}.md").read_text() if secret is not None else ""
    assert secret is None or f"create secret generic {secret.name} --from-literal=HF_TOKEN=" in text


@pytest.mark.parametrize(("page", "block"), PARTS)
def test_a_part_of_a_service_holds(page: str, block: str, tmp_path: Path) -> None:
    spec = {"model": {"source": "pvc://models/llama"}} | yaml.safe_load(block)["spec"]
    whole = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {"name": "part"}, "spec": spec}
    loaded(yaml.safe_dump(whole), tmp_path)


def test_the_gateway_of_the_pages_gets_its_keys() -> None:
    [gateway] = [values["gateway"] for _, block in VALUES if "gateway" in (values := yaml.safe_load(block))]
    assert gateway["enabled"]
    assert f"create secret generic {gateway['apiKeysSecret']} " in (DOCS / "gateway.md").read_text()


def health_check() -> tuple[str, str]:
    """Of Argo CD: its key in the ConfigMap, and its Lua."""
    [config] = [made for made in OTHERS if made["kind"] == "ConfigMap"]
    [(key, lua)] = config["data"].items()
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


def test_requests_have_a_key_of_the_pages() -> None:
    [secret] = [made for made in OTHERS if made["kind"] == "Secret"]
    keys = {key for value in secret["stringData"].values() for key in value.split()}
    used = {key for page in PAGES for key in re.findall(r"Authorization: Bearer (\S+)'", page.read_text())}
    assert used
    assert used <= keys


FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
TOP = "|".join(path.name for path in FOLDERS)
WRITTEN = [
    *ROOT.glob("*.md"),
    *(page for folder in FOLDERS for page in folder.rglob("*.md") if "node_modules" not in page.parts),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(rf"`((?:{TOP})/[\w./-]+)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_links_between_files_lead_somewhere() -> None:
    """As a git host follows them, of every page in the tree. Anchors are checked with the site (test_site.py)."""
    texts = {page: re.sub(r"`[^`\n]*`", "", page.read_text()) for page in WRITTEN}
    links = [
        (page, link) for page, text in texts.items() for link in re.findall(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)", text)
    ]
    assert len(links) > 100
    assert [(str(page), link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_reading_order_names_every_room_of_the_operator_and_files_that_are_there() -> None:
    packages = [ROOT / program / f"kvasir_{program}" for program in ("operator", "router", "runtime")]
    text = (DOCS / "architecture.md").read_text()
    rooms = {room.name for room in packages[0].iterdir() if (room / "__init__.py").exists()}
    assert [room for room in sorted(rooms) if f"`{room}/" not in text] == []
    named = re.findall(r"`([a-z_/]+\.py)`", text)
    assert len(named) > 30
    assert [name for name in named if not any((package / name).exists() for package in packages)] == []
