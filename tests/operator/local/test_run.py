"""A whole local run as a process of its own: it serves, and whatever ends it leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

import pytest
from tests.runtime.model_sources.hub_server import Repository, running_hub

from kvasir_operator.errors import AddressInUseError, InvalidSettingsError, LocalRunError
from kvasir_operator.local.options import LocalOptions
from kvasir_operator.local.run import run_local

PROGRAM = """
import sys
from pathlib import Path
from kvasir_operator.local.options import LocalOptions
from kvasir_operator.local.run import run_local
sys.exit(run_local([Path(p) for p in sys.argv[2:]], LocalOptions("127.0.0.1", 0, Path(sys.argv[1]))))
"""
BOUND_SECONDS = 30.0
Found = TypeVar("Found")
Start = Callable[..., "LocalRun"]


class LocalRun:
    """A running `local`, its output, and the processes that it started."""

    def __init__(self, programs: Path, *files: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(programs), *map(str, files)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def printed(self, pattern: str) -> "re.Match[str]":
        def find() -> "re.Match[str] | None":
            return re.search(pattern, "".join(self.lines))

        return eventually(find, f"{pattern} in the output", lambda: "".join(self.lines))

    def children(self) -> set[int]:
        return descendants(self.process.pid)

    def end(self) -> str:
        """Waits for its end; returns the whole output."""
        self.process.wait(BOUND_SECONDS)
        self._reader.join(BOUND_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return "".join(self.lines)


def eventually(find: Callable[[], Found], what: str, context: Callable[[], str] = str) -> Found:
    deadline = time.monotonic() + BOUND_SECONDS
    while not (found := find()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {BOUND_SECONDS} s for {what}\n{context()}")
        time.sleep(0.02)
    return found


def descendants(pid: int) -> set[int]:
    """Every process below `pid`, however deep."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    below, level = set[int](), {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        below |= level
    return below


def is_running(pid: int) -> bool:
    """False for a zombie too: nobody may have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ask(url: str) -> Any:
    with urlopen(url, timeout=BOUND_SECONDS) as answer:
        return json.load(answer)


@pytest.fixture
def start(programs: Path) -> Iterator[Start]:
    """Starts a local run of manifest files, and makes sure that it has ended afterwards."""
    runs: list[LocalRun] = []

    def make(*files: Path) -> LocalRun:
        runs.append(LocalRun(programs, *files))
        return runs[-1]

    yield make
    for run in runs:
        run.process.kill()
        run.end()


def test_serves_where_it_says_and_stops_routers_before_engines(
    start: Start, write_manifest: Callable[..., Path]
) -> None:
    run = start(write_manifest(replicas=2))
    base = run.printed(r"llama is ready after [0-9.]+ s: (http://127\.0\.0\.1:\d+)/v1 serves llama")[1]
    arguments = ask(f"{base}/arguments")
    run.process.send_signal(signal.SIGTERM)
    text = run.end()

    assert run.process.returncode == 0
    assert arguments.count("--endpoint") == 2
    assert re.search(r"\[llama-router-0\] fake program ends(.|\n)*\[llama-serve-[01]\] +fake program ends", text)
    assert text.endswith("[local]          stopped\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_leaves_no_process_behind(start: Start, write_manifest: Callable[..., Path], number: signal.Signals) -> None:
    run = start(write_manifest(replicas=2))
    run.printed("is ready after")
    children = run.children()
    run.process.send_signal(number)
    run.end()

    assert len(children) >= 4  # two engines, a router, the watchdog
    eventually(lambda: not any(map(is_running, children)), "the end of every child")


def test_even_stubborn_grandchildren_go_when_the_run_is_killed(
    start: Start, write_manifest: Callable[..., Path]
) -> None:
    run = start(write_manifest(pod={"env": [{"name": "FAKE_STUBBORN", "value": "1"}]}))
    run.printed("is ready after")
    grandchild = int(run.printed(r"fake child (\d+)")[1])
    run.process.kill()
    run.end()

    eventually(lambda: not is_running(grandchild), "the end of the grandchild")


def test_a_second_signal_ends_the_grace(start: Start, write_manifest: Callable[..., Path]) -> None:
    stubborn = {"env": [{"name": "FAKE_STUBBORN", "value": "1"}]}
    run = start(write_manifest(pod=stubborn, rollout={"drainTimeout": "600s"}))
    run.printed("is ready after")
    run.process.send_signal(signal.SIGINT)
    run.printed("llama-router-0\\] fake program ends")
    run.process.send_signal(signal.SIGINT)
    run.end()

    assert run.process.returncode == 0


def test_a_pod_that_dies_is_started_again_while_the_rest_serves(
    start: Start, write_manifest: Callable[..., Path]
) -> None:
    run = start(write_manifest())
    base = run.printed(r"(http://[0-9.:]+)/v1 serves")[1]
    engine = run.printed(r"llama-serve-0 starting at (http://\S+)")[1]
    os.kill(ask(f"{engine}/pid"), signal.SIGKILL)

    run.printed(r"llama-serve-0 ended with signal SIGKILL after [0-9.]+ s, starting it again in 1 s")
    run.printed(r"starting it again(.|\n)*llama-serve-0 ready after")
    assert ask(f"{base}/ready") == "ok"


def test_pods_of_a_group_start_and_fail_together(start: Start, write_manifest: Callable[..., Path]) -> None:
    run = start(write_manifest(parallelism={"pipeline": 2}))
    base = run.printed(r"(http://[0-9.:]+)/v1 serves")[1]
    arguments = ask(f"{base}/arguments")
    first, second = (run.printed(rf"llama-serve-0-{rank} starting at (http://\S+)")[1] for rank in (0, 1))
    os.kill(ask(f"{second}/pid"), signal.SIGKILL)

    run.printed(r"llama-serve-0-1 ended with signal SIGKILL .* starting all pods of llama-serve-0 again in 1 s")
    run.printed(r"again in(.|\n)*llama-serve-0-0 ready after")
    run.process.send_signal(signal.SIGTERM)
    text = run.end()
    assert [url for flag, url in pairwise(arguments) if flag == "--endpoint"] == [first]
    assert text.count("[llama-serve-0-0] fake program starts") == 2
    assert run.process.returncode == 0


def test_a_pod_that_cannot_start_ends_the_run_with_its_reason(
    start: Start, write_manifest: Callable[..., Path]
) -> None:
    run = start(write_manifest(pod={"env": [{"name": "FAKE_EXIT", "value": "2"}]}))
    text = run.end()

    assert run.process.returncode == 1
    assert "[llama-serve-0]  fake program refuses its flags" in text
    assert "PodNeverReadyError: llama-serve-0 ended 3 times before it was ready, last with status 2" in text


def test_several_services_of_one_run_get_ports_of_their_own(start: Start, write_manifest: Callable[..., Path]) -> None:
    run = start(write_manifest(name="one"), write_manifest(name="two"))
    urls = {run.printed(rf"{name} is ready after .*: (\S+)/v1 serves {name}")[1] for name in ("one", "two")}

    assert len(urls) == 2
    assert all(ask(f"{url}/ready") == "ok" for url in urls)


def test_what_is_not_acted_on_is_said_once(start: Start, write_manifest: Callable[..., Path]) -> None:
    file = write_manifest(engine={"device": "cpu", "kvCache": {"hostMemory": "1Gi"}})
    file.write_text(file.read_text() + "\n---\n{apiVersion: v1, kind: Namespace, metadata: {name: models}}\n")
    run = start(file)
    run.printed(r"Namespace models is passed over")
    run.printed(r"warning: llama: spec\.engine\.kvCache\.hostMemory: there is no host tier yet")

    run.printed("is ready after")
    assert "".join(run.lines).count("not applied") == 1


def test_a_pod_is_told_how_much_memory_it_may_use(start: Start, write_manifest: Callable[..., Path]) -> None:
    run = start(write_manifest(resources={"memory": "3Gi"}))
    url = run.printed(r"llama-serve-0 starting at (http://[^ \n]+)")[1]
    run.printed("is ready after")

    assert ask(f"{url}/memory") == 3 * 1024**3


def test_a_port_in_use_is_named_before_anything_starts(write_manifest: Callable[..., Path], programs: Path) -> None:
    file = write_manifest()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUseError, match=rf"127\.0\.0\.1:{port} is in use .*the router of llama .*--listen"):
            run_local([file], LocalOptions("127.0.0.1", port, programs))


def test_a_port_for_every_service_must_be_left(write_manifest: Callable[..., Path], programs: Path) -> None:
    files = [write_manifest(name="one"), write_manifest(name="two")]

    with pytest.raises(InvalidSettingsError, match="--listen leaves no port for two"):
        run_local(files, LocalOptions("127.0.0.1", 65535, programs))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"engine": {"quantization": "int8"}}, r"spec\.engine\.quantization: int8 is not supported yet"),
    ],
)
def test_what_cannot_start_is_refused(
    write_manifest: Callable[..., Path], programs: Path, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(LocalRunError, match=f"llama cannot start: {message}"):
        run_local([write_manifest(**spec)], LocalOptions("127.0.0.1", 0, programs))


def test_two_services_of_one_name_are_refused(write_manifest: Callable[..., Path], programs: Path) -> None:
    file = write_manifest()

    with pytest.raises(LocalRunError, match="two services are named llama"):
        run_local([file, file], LocalOptions("127.0.0.1", 0, programs))


BEHIND = {"mode": "gateway"}


def test_services_behind_the_gateway_share_one_router_that_is_told_of_their_engines(
    start: Start, write_manifest: Callable[..., Path]
) -> None:
    run = start(write_manifest(name="one", router=BEHIND), write_manifest(name="two", router=BEHIND, replicas=2))
    urls = {run.printed(rf"{name} is ready after .*: (\S+)/v1 serves {name}")[1] for name in ("one", "two")}
    [url] = urls
    arguments, environment = ask(f"{url}/arguments"), ask(f"{url}/environment")
    server = json.loads(Path(environment["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]["server"]
    slices = ask(f"{server}/apis/discovery.k8s.io/v1/endpointslices")["items"]
    run.process.send_signal(signal.SIGTERM)
    text = run.end()

    assert arguments[arguments.index("--gateway") + 1] == "*"
    assert arguments[arguments.index("--kv-events") + 1] == "5557:5657"
    assert sorted(each["metadata"]["name"] for each in slices) == ["one-serve-0", "two-serve-0", "two-serve-1"]
    assert environment["KVASIR_GATEWAY_SECRET"] not in text
    assert text.count("fake program starts") == 4
    assert re.search(r"\[gateway\] +fake program ends(.|\n)*\[two-serve-1\] +fake program ends", text)
    assert run.process.returncode == 0


def test_a_service_with_a_router_of_its_own_stays_beside_the_gateway(
    start: Start, write_manifest: Callable[..., Path]
) -> None:
    run = start(write_manifest(name="one", router=BEHIND), write_manifest(name="own"))
    urls = {run.printed(rf"{name} is ready after .*: (\S+)/v1 serves {name}")[1] for name in ("one", "own")}

    assert len(urls) == 2
    assert "--endpoint" in ask(f"{run.printed(r'own is ready .*: (http[^ ]+)/v1')[1]}/arguments")


def test_a_name_that_two_services_claim_behind_the_gateway_is_refused(
    write_manifest: Callable[..., Path], programs: Path
) -> None:
    model = {"source": "file:///models/small", "name": "big"}
    files = [write_manifest(name=name, router=BEHIND, model=model) for name in ("one", "two")]

    with pytest.raises(LocalRunError, match="one and two are both to serve big behind the gateway: rename"):
        run_local(files, LocalOptions("127.0.0.1", 0, programs))


def test_models_are_fetched_before_their_engines_start(
    start: Start, write_manifest: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = start(write_manifest(model={"source": "hf://org/name"}))
    run.printed("is ready after")
    run.process.send_signal(signal.SIGTERM)
    text = run.end()

    fetched = rf"\[llama-serve-0\] +fake fetch of hf://org/name into {tmp_path}/kvasir/models/hf/org/name/main"
    assert re.search(rf"{fetched}\n(.|\n)*llama-serve-0 starting at(.|\n)*\[llama-serve-0\] +fake program starts", text)
    assert run.process.returncode == 0


def test_the_real_loader_fetches_a_model_from_a_hub(
    start: Start, write_manifest: Callable[..., Path], programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = (programs / "kvasir-runtime").rename(programs / "fake-runtime")
    loader = f'[ "$1" = fetch ] && exec {sys.executable} -m kvasir_runtime "$@"'
    (programs / "kvasir-runtime").write_text(f'#!/bin/sh\n{loader}\nexec {fake} "$@"\n')
    (programs / "kvasir-runtime").chmod(0o755)
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 1000}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with running_hub() as hub:
        hub.repositories["org/name"] = Repository(files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        run = start(write_manifest(model={"source": "hf://org/name"}))
        run.printed("is ready after")
        run.process.send_signal(signal.SIGTERM)
        text = run.end()

    folder = tmp_path / "kvasir" / "models" / "hf" / "org" / "name" / "main"
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert re.search(r"llama-serve-0 starting at(.|\n)*\[llama-serve-0\] +fake program starts", text)


def test_an_engine_whose_model_cannot_be_had_is_given_up(
    start: Start, write_manifest: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FETCH_EXIT", "1")
    run = start(write_manifest(model={"source": "hf://org/name"}))
    text = run.end()

    assert "llama-serve-0 ended 3 times before it was ready, last with status 1: its log above says why" in text
    assert "llama-serve-0 starting at" not in text
    assert run.process.returncode != 0
