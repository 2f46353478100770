"""Every command of the documentation is run by a test: here, or by a test that is named here.

One that matches no line of RUN_BY fails. Tests that take their commands from the pages (`documented`) run a new one of
their kind without a change.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.docs.commands import ROOT, Command, documented

from kvasir_runtime.config_checks import check_values
from kvasir_runtime.flags import Parser, add_flags, config_from

HERE = "tests/docs/test_commands.py"
CONTROL_PLANE = "tests/controlplane/test_documented_commands.py"
RUN_BY = {
    # expression: the test, and text in it by which it runs the command
    r"make run$": ("tests/local/test_quickstart.py", "stream_answer"),
    r"make test$": (".ci/run", "exec make test"),
    r"make setup$": ("Makefile", "lint: $(INSTALLED)"),  # as `setup`: the first thing that `make test` does
    r"images/release ": ("tests/images/test_release.py", 'clone / "images" / "release", VERSION, registry.address'),
    r"git tag v": ("tests/images/test_release.py", '"tag", f"v{VERSION}"'),
    r"docker build -f images/(operator|router|runtime)/Containerfile ": (
        "e2e/cluster/images",  # with buildah
        '"--file", str(ROOT / "images" / image.program / "Containerfile")',
    ),
    r"e2e/cluster/images$": ("e2e/conftest.py", 'RIG / "images"'),
    r"\.venv/bin/kvasir-operator local examples/quickstart\.yaml$": (
        "tests/local/conftest.py",
        '"local", str(manifest), "--listen"',
    ),
    r"\.venv/bin/kvasir-operator render ": (HERE, 'documented(".venv/bin/kvasir-operator render'),
    r"kvasir-runtime serve ": (HERE, 'documented("kvasir-runtime serve ")'),
    r"kvasir-runtime run-batch ": ("tests/runtime/cli/test_run_batch.py", '"run-batch", str(model_folder)'),
    r"kvasir-runtime fetch hf://": ("tests/runtime/model_sources/test_fetch_command.py", '"fetch", address'),
    r"python -m benchmarks\.routing ": (HERE, 'documented("python -m benchmarks.routing ")'),
    r"curl http://127\.0\.0\.1:8080/": ("tests/local/test_quickstart.py", 'documented("curl http://127.0.0.1:8080")'),
    r"curl http://127\.0\.0\.1:8000/": (
        "tests/runtime/cli/test_tool_calls.py",
        'documented("curl http://127.0.0.1:8000/")',
    ),
    r"kubectl ": (CONTROL_PLANE, 'documented("kubectl ")'),
    r"helm install ": ("e2e/helm/test_docs.py", 'documented("helm install ")'),
    r"helm upgrade ": ("e2e/helm/test_docs.py", 'documented("helm upgrade ")'),
    r"helm test ": ("e2e/quickstart/test_quickstart.py", 'live_helm.run("test", RELEASE'),
    r"helm uninstall ": ("e2e/quickstart/test_quickstart.py", "live_helm.uninstall(SYSTEM)"),
    # Of other makes, with engines that have a secret: benchmarks/foreign_routers.py.
    r"export KVASIR_ROUTER_SECRET=": ("benchmarks/foreign_routers.py", '"KVASIR_ROUTER_SECRET"'),
    r"vllm-router ": ("benchmarks/foreign_programs.py", '"--vllm-pd-disaggregation", "--prefill"'),
    r"pd-sidecar ": ("benchmarks/foreign_programs.py", '"--kv-connector", "nixlv2"'),
    r"curl http://10\.0\.0\.2:8001/": ("benchmarks/foreign_programs.py", "x-prefiller-host-port"),
}


@pytest.mark.parametrize("command", documented(), ids=str)
def test_a_command_is_run_by_a_test(command: Command) -> None:
    tests = [test for expression, test in RUN_BY.items() if re.match(expression, command.text)]
    assert tests, f"no test runs this: add one, and a line to RUN_BY in {HERE}"
    path, text = tests[0]
    assert text in (ROOT / path).read_text(), f"{path} does not run it any more: {text!r} is not there"


def test_every_line_is_needed() -> None:
    texts = [command.text for command in documented()]
    assert [expression for expression in RUN_BY if not any(re.match(expression, text) for text in texts)] == []


def typed(text: str, folder: Path) -> str:
    """What it prints, with the programs of this environment."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    text = text.replace(".venv/bin/", "").replace("TRACE.jsonl", str(folder / "trace.jsonl"))
    done = subprocess.run(["bash", "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", documented(".venv/bin/kvasir-operator render "), ids=str)
def test_what_a_cluster_would_get_is_printed(command: Command, tmp_path: Path) -> None:
    kinds = {each["kind"] for each in yaml.safe_load_all(typed(command.text, tmp_path))}
    assert {"Deployment", "Service", "Secret"} <= kinds


@pytest.mark.parametrize("command", documented("python -m benchmarks.routing "), ids=str)
def test_a_trace_is_played(command: Command, tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i]} for i in range(20)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "| kvasir, KV events |" in typed(command.text, tmp_path)


@pytest.mark.parametrize("command", documented("kvasir-runtime serve "), ids=str)
def test_flags_of_an_engine_hold(command: Command) -> None:
    """What the engine itself asks of them before it looks at the model. tests/runtime/cli serves with such flags."""
    parser = Parser()
    add_flags(parser)
    _, _, *arguments = shlex.split(command.text)
    check_values(config_from(parser.parse_all(arguments)))
