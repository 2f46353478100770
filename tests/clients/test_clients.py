"""Clients that people use, asked to do what docs/clients.md says of them, by one service of four small models.

Each client's script runs once, in an environment of its own, and tells what became of each feature.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.clients.environments import HERE, Script, made
from tests.clients.page import rows
from tests.controlplane.processes import wait_until
from tests.local.conftest import LocalService

MODELS = Path(__file__).parents[2] / "examples" / "models"
SERVED = {
    "writer": ("kvasir-python-7m", []),
    "caller": ("kvasir-caller", []),
    "embedder": ("kvasir-python-700k", ["--runner", "pooling"]),
}
"""Folder and flags of each."""
CODERS_PREFIX = "mcp__sky__"
"""Of its tools' names, as coding agents have those of the MCP server `sky`."""
LAST_EXCHANGE = """
{%- set last = namespace(messages=[]) %}
{%- for message in messages if message.role in ("user", "assistant", "tool") %}
    {%- set lines = (message.content or "").split("\\n") %}
    {%- set asked = lines | select("in", ["Hello", "What is the weather in Paris?"]) | list %}
    {%- set shown = [dict(message, content=(asked or lines)[-1])] %}
    {%- set last.messages = shown if message.role == "user" else last.messages + shown %}
{%- endfor %}
{%- set messages = last.messages %}
{%- set tools = (tools or []) | selectattr("function.name", "in", ["mcp__sky__weather", "mcp__sky__time"]) | list %}"""
"""Before a template: it shows no more, and of each text one line, for agents whose instructions are longer than the
context of a model that knows two tools."""
SCRIPT_LIMIT_SECONDS = 600
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
FEATURES = [(row.script, feature) for row in rows() for feature in row.features]


@dataclass(frozen=True)
class Outcome:
    errors: dict[str, str | None]
    """By feature; None where it works."""
    ending: str
    """What the script wrote, for features that it never came to."""


def manifest(name: str, folder: str, flags: list[str]) -> dict[str, object]:
    engine = {"device": "cpu", "dtype": "float32", "maxNumSeqs": 16}
    return {
        "apiVersion": "serving.kvasir.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": f"file://{MODELS / folder}"},
            "engine": engine | {"args": [*flags, "--kv-cache-memory-bytes", str(128 << 20)]},
            "resources": {"accelerator": "none", "cpu": "1", "memory": "2Gi"},
            "pod": {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            "router": {"mode": "gateway"},
        },
    }


def train_coder(script: Path, folder: Path) -> None:
    subprocess.run([sys.executable, str(script), str(folder), "--prefix", CODERS_PREFIX], check=True)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("clients")
    path, template = folder / "services.yaml", folder / "last_exchange.jinja"
    coder = made(MODELS / "train_caller.py", train_coder)
    template.write_text(LAST_EXCHANGE + (coder / "chat_template.jinja").read_text())
    all_served = SERVED | {"coder": (str(coder), ["--chat-template", str(template)])}
    path.write_text(yaml.safe_dump_all(manifest(name, *served) for name, served in all_served.items()))
    service = LocalService(path)
    try:
        service.wait_ready()
        wait_until(lambda: len(list(service.client().models.list())) == len(all_served), 60, "all models to be listed")
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def outcomes(service: LocalService) -> Callable[[str], Outcome]:
    """Of a script, which runs when it is first asked for."""
    return cache(lambda script: run(script, service.url))


def run(script: str, url: str) -> Outcome:
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment |= {"KVASIR_URL": url, "PYTHONPATH": str(HERE / "python"), "PYTHONUNBUFFERED": "1"}
    command = ["timeout", str(SCRIPT_LIMIT_SECONDS), *Script(HERE / script).command()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    ending = f"{script} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return Outcome({each["feature"]: each["error"] for each in told}, ending)


@pytest.mark.parametrize(("script", "feature"), FEATURES)
def test_what_the_page_says_works(outcomes: Callable[[str], Outcome], script: str, feature: str) -> None:
    outcome = outcomes(script)
    assert feature in outcome.errors, outcome.ending
    error = outcome.errors[feature]
    assert error is None, f"{feature} of {script}:\n{error}"
