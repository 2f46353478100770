"""Clients that people use, asked to do what docs/clients.md says of them, by one service of three small models.

Each client's script runs once, in an environment of its own, and tells what became of each feature.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.clients.environments import HERE, Script
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
SCRIPT_LIMIT_SECONDS = 280
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
Results = dict[str, str | None]
FEATURES = [(row.script, feature) for row in rows() for feature in row.features]


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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    path = tmp_path_factory.mktemp("clients") / "services.yaml"
    path.write_text(yaml.safe_dump_all(manifest(name, *served) for name, served in SERVED.items()))
    service = LocalService(path)
    try:
        service.wait_ready()
        wait_until(lambda: len(list(service.client().models.list())) == len(SERVED), 60, "all models to be listed")
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def results(service: LocalService) -> Callable[[str], Results]:
    """Error, or None, of each feature of a script."""
    return cache(lambda script: run(script, service.url))


def run(script: str, url: str) -> Results:
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment |= {"KVASIR_URL": url, "PYTHONPATH": str(HERE / "python"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        Script(HERE / script).command(), env=environment, capture_output=True, text=True, timeout=SCRIPT_LIMIT_SECONDS
    )
    assert done.returncode == 0, f"{script} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    return {each["feature"]: each["error"] for each in told}


@pytest.mark.parametrize(("script", "feature"), FEATURES)
def test_what_the_page_says_works(results: Callable[[str], Results], script: str, feature: str) -> None:
    error = results(script)[feature]
    assert error is None, f"{feature} of {script}:\n{error}"
