"""The operator starts `kvasir-runtime fetch`, asks it how far it is, and reads from its last line why it ended."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from kvasir_operator.api.conditions import DOWNLOAD_FAILURES
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.observe.model_loader import DownloadProgress, why_loader_fails
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings
from kvasir_runtime import cli
from kvasir_runtime.errors import FetchError
from kvasir_runtime.flags import Parser
from kvasir_runtime.model_sources.command import add_fetch_arguments
from kvasir_runtime.model_sources.progress import ProgressMeter

SETTINGS = OperatorSettings()
SPEC = {
    "model": {"source": "hf://org/name", "cache": {"sizeLimit": "20Gi"}},
    "engine": {"speculative": {"method": "eagle3", "model": "s3://bucket/draft"}},
}


def failures(kind: type[FetchError] = FetchError) -> Iterator[type[FetchError]]:
    """Those that are raised: every one that names a reason."""
    if hasattr(kind, "reason"):
        yield kind
    for narrower in kind.__subclasses__():
        yield from failures(narrower)


def loaders() -> list[dict[str, Any]]:
    kind = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}
    service = parse_service({**kind, "metadata": {"name": "llama", "namespace": "models"}, "spec": SPEC})
    [role] = engine_roles(service, SETTINGS.defaults)
    found: list[dict[str, Any]] = engine_pod_template(service, role, SETTINGS)["spec"]["initContainers"]
    return found


def test_the_runtime_understands_the_loaders_commands() -> None:
    parser = Parser(prog="kvasir-runtime fetch")
    add_fetch_arguments(parser)
    parsed = [parser.parse_all(each["command"][2:]) for each in loaders()]

    assert [each["command"][:2] for each in loaders()] == [["kvasir-runtime", "fetch"]] * 2
    assert [each.source for each in parsed] == ["hf://org/name", "s3://bucket/draft"]
    assert {(each.host, each.port, each.size_limit) for each in parsed} == {("::", 8000, 20 << 30)}


def test_progress_is_read_as_it_is_written() -> None:
    meter = ProgressMeter("hf://org/name", time.monotonic)
    meter.begin(10)

    assert asdict(DownloadProgress(**meter.sample().as_json())) == meter.sample().as_json() | {
        "idle_seconds": pytest.approx(0, abs=60)
    }


def test_every_failure_is_a_reason_of_a_condition() -> None:
    assert {kind.reason for kind in failures()} == {reason.value for reason in DOWNLOAD_FAILURES}


@pytest.mark.parametrize("kind", list(failures()), ids=lambda kind: kind.reason)
def test_the_last_line_tells_which(kind: type[FetchError]) -> None:
    found = found_of(1, kind("hf://org/name: what was seen,\n  on two lines").last_words)
    assert found == (kind.reason, "hf://org/name: what was seen, on two lines")


def test_the_last_line_of_a_fetch_that_fails_is_that(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fetch", "hf://org/name", "/dev/null/no-folder"])
    found = found_of(ended.value.code, capsys.readouterr().err)
    assert found is not None
    assert found[0] == "CacheUnavailable"


def found_of(exit_code: Any, message: str) -> tuple[str, str] | None:
    state = {"terminated": {"exitCode": exit_code, "message": message}}
    found = why_loader_fails({"name": "model-loader", "state": state, "restartCount": 0}, None)
    return None if found is None else (found[0].value, found[1])
