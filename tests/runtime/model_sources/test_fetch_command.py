"""`kvasir-runtime fetch` as a process: killed in the middle, several at once, no room, and what it says meanwhile."""

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.runtime.model_sources.conftest import MODEL, WEIGHTS, environment, files_in
from tests.runtime.model_sources.hub_server import TOKEN, Hub

from kvasir_operator.local.network import free_port
from kvasir_runtime.config import ModelConfig
from kvasir_runtime.model_sources.command import fetched

BOUND_SECONDS = 120
MODEL_BYTES = sum(map(len, MODEL.values()))
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Iterator[Start]:
    """Into `tmp_path/model`; killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str, address: str = "hf://org/name", **options: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "kvasir_runtime", "fetch", address, str(tmp_path / "model"), *arguments]
        env = environment(HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=env, **pipes, **options))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def end(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=BOUND_SECONDS)[0]


def test_a_run_that_was_killed_is_gone_on_with(hub: Hub, start: Start, tmp_path: Path) -> None:
    hub.faults.silent_after[WEIGHTS] = 2_000_000
    first = start()
    assert hub.faults.reached.wait(BOUND_SECONDS)
    parts = tmp_path / "model" / ".kvasir" / "parts"
    wait_for(lambda: any(part.stat().st_size >= 1_000_000 for part in parts.iterdir()))
    first.send_signal(signal.SIGKILL)
    end(first)
    assert not (tmp_path / "model" / ".kvasir" / "complete.json").exists()
    hub.faults.released.set()
    second = start()
    output = end(second)

    assert second.returncode == 0, output
    assert files_in(tmp_path / "model") == MODEL
    assert hub.offsets(WEIGHTS)[1] >= 1_000_000
    assert TOKEN not in output


def wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(BOUND_SECONDS * 50):
        if is_so():
            return
        threading.Event().wait(0.02)
    raise AssertionError("waited in vain")


def test_replicas_on_one_cache_download_once(hub: Hub, start: Start, tmp_path: Path) -> None:
    hub.faults.silent_after[WEIGHTS] = 1_000_000
    port = free_port("127.0.0.1")
    first = start()
    assert hub.faults.reached.wait(BOUND_SECONDS)
    second = start("--port", str(port))
    wait_for(lambda: progress(port).get("state") == "waiting")
    hub.faults.released.set()

    for process in (first, second):
        output = end(process)
        assert process.returncode == 0, output
    assert files_in(tmp_path / "model") == MODEL
    assert hub.offsets("config.json") == [0]


def progress(port: int) -> dict[str, Any]:
    """Empty while nobody listens."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/progress", timeout=BOUND_SECONDS) as answer:
            content: dict[str, Any] = json.load(answer)
            return content
    except OSError:
        return {}


@pytest.mark.parametrize("end_by", [signal.SIGTERM, signal.SIGINT])
def test_says_over_http_how_far_it_is_and_ends_when_it_is_told_to(
    hub: Hub, start: Start, end_by: signal.Signals
) -> None:
    hub.faults.silent_after[WEIGHTS] = 1_500_000
    port = free_port("127.0.0.1")
    process = start("--host", "::", "--port", str(port))
    wait_for(lambda: progress(port).get("bytes_done", 0) >= 1_000_000)
    seen = progress(port)
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND_SECONDS)
    process.send_signal(end_by)
    output = end(process)

    assert seen["address"] == "hf://org/name"
    assert seen["state"] == "downloading"
    assert seen["bytes_total"] == MODEL_BYTES
    assert process.returncode == 128 + end_by
    assert "Traceback" not in output
    assert "hf://org/name: downloading: 1.50 MB of 3.00 MB (50 %)" in output


def no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_disk_that_fills_up_is_named_on_the_last_line(start: Start) -> None:
    process = start(preexec_fn=no_large_files)
    output = end(process)

    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("kvasir-runtime: error: DiskFull: ")
    assert "is full" in output.splitlines()[-1]


def test_a_volume_that_is_too_small_is_not_begun_with(hub: Hub, start: Start) -> None:
    process = start("--size-limit", str(MODEL_BYTES - 1))
    output = end(process)

    assert "error: DiskFull: hf://org/name takes 3.00 MB, and the cache may hold 3.00 MB: raise spec.mod" in output
    assert hub.asked == []


@pytest.mark.parametrize(
    ("address", "status", "last_line"),
    [
        ("hf://org/gone", 1, "kvasir-runtime: error: ModelNotFound: hf://org/gone: the hub has no org/gone"),
        ("ftp://x/y", 2, "kvasir-runtime: error: SOURCE is ftp://x/y: expected hf://ORG/NAME"),
    ],
)
def test_what_cannot_be_had_is_the_last_line(start: Start, address: str, status: int, last_line: str) -> None:
    process = start(address=address)
    output = end(process)

    assert (process.returncode, output.splitlines()[-1][: len(last_line)]) == (status, last_line)
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("model", "name"),
    [("hf://org/name", "org/name"), ("org/name", "org/name"), ("hf://org/name@main", "org/name@main")],
)
def test_what_is_to_be_served_is_fetched_once(hub: Hub, tmp_path: Path, model: str, name: str) -> None:
    asked = ModelConfig(model=model, download_dir=str(tmp_path))
    models = [fetched(asked), fetched(asked)]
    assert {(each.model, each.served_model_name) for each in models} == {(str(tmp_path / name), ("org/name",))}
    assert files_in(tmp_path / name) == MODEL
    assert hub.offsets(WEIGHTS) == [0]
    assert fetched(
        ModelConfig(model=model, download_dir=str(tmp_path), served_model_name=("m",))
    ).served_model_name == ("m",)


@pytest.mark.parametrize("model", ["folder", "./org/name", "/org/name", "../name", "a/b/c", "https://x/y"])
def test_what_is_no_name_in_a_hub_is_left_as_it_is(model: str) -> None:
    assert fetched(ModelConfig(model=model)) == ModelConfig(model=model)


def test_a_folder_here_comes_before_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetched(ModelConfig(model="org/name")).model == "org/name"
