"""`serve` as a process: what it answers, how it ends, and what it refuses."""

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from safetensors.torch import load_file, save_file
from tests.runtime.model_sources.hub_server import Repository, running_hub

from kvasir_runtime.cli import main
from kvasir_runtime.heartbeat import SILENT_SECONDS

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
ID = {"x-request-id": "refused"}


@pytest.fixture(scope="module")
def events_endpoint(tmp_path_factory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('events')}/events"


@pytest.fixture(scope="module")
def two_apis(serve_all, events_endpoint):
    """A server of two API processes, for the tests that name it in their order; the last of them ends it."""
    replay = f"{events_endpoint}-replay"
    config = {"enable_kv_cache_events": True, "load_hz": 50, "endpoint": events_endpoint, "replay_endpoint": replay}
    flags = ("--api-server-count", "2", "--kv-events-config", json.dumps(config), "--log-format", "json")
    return serve_all(*flags).wait_ready()


@pytest.fixture(scope="module")
def drafting(serve_all):
    """A server that drafts, for the tests that name it in their order; the last of them ends it."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    return serve_all("--dtype", "float32", "--speculative-config", json.dumps(config)).wait_ready()


def test_one_engine_of_two_api_processes_publishes_what_it_caches_and_how_busy_it_is(two_apis, events_endpoint):
    """The first test of this server, which has cached nothing yet."""
    server = two_apis
    prompt = list(range(64))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.setsockopt(zmq.RCVTIMEO, 30_000)
    reader.connect(events_endpoint)
    batches, reports = [], []
    try:
        for number in range(8):  # on connections of their own, so that both processes take some
            body = BODY | {"prompt": [number, *prompt], "max_tokens": 2}
            headers = {"x-request-id": f"request-{number}"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).is_success
        while len(batches) < 8 or sum(len(report[9]) for report in reports) < 8:
            topic, _, payload = reader.recv_multipart()
            (reports if topic == b"kvasir-load" else batches).append(msgspec.msgpack.decode(payload))
    finally:
        reader.close(linger=0)
        context.term()
    stored = [event for _, events, _ in batches for event in events if event[0] == "BlockStored"]
    assert [event[3] for event in stored] == [[number, *prompt[:63]] for number in range(8)]
    assert {name for report in reports for name in report[9]} == {f"request-{number}" for number in range(8)}
    assert {report[10] for report in reports} == {httpx.get(f"{server.url}/load").json()["instance"]}
    published = 'kvasir_kv_events_published_total{model_name="tiny"} 9.0'
    assert published in httpx.get(f"{server.url}/metrics").text.splitlines()


def test_two_api_processes_share_the_port_and_the_engine(two_apis):
    answers: list[str] = []

    def ask() -> None:
        body = BODY | {"max_tokens": 8}
        answers.append(httpx.post(f"{two_apis.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 16
    assert len(set(answers)) == 1


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_answers_the_same_when_it_is_awake(two_apis, level):
    """Whichever of the API processes is asked."""
    url, body = two_apis.url, BODY | {"prompt": list(range(100)), "max_tokens": 20}
    before = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert httpx.post(f"{url}/sleep", params={"level": level}, timeout=60).status_code == 200
    for _ in range(6):
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
        assert [httpx.get(f"{url}/{path}").status_code for path in ("ready", "health")] == [503, 200]
    assert httpx.post(f"{url}/wake_up", timeout=60).status_code == 200
    after = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert after["choices"][0]["text"] == before
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_api_process_that_is_stopped_makes_the_others_unhealthy(two_apis):
    server = two_apis
    core = server.engine_core()
    api_process = next(pid for pid in server.children() if pid != core and "spawn_main" in command_of(pid))
    wait_for_status(server, "/health", 200)
    os.kill(api_process, signal.SIGSTOP)
    wait_for_status(server, "/health", 503)
    os.kill(api_process, signal.SIGCONT)
    wait_for_status(server, "/health", 200)


def test_sigterm_lets_a_stream_end_and_then_exits_with_0(two_apis):
    """The last test of this server, whose log is JSON."""
    server = two_apis
    assert httpx.post(f"{server.url}/v1/completions", json=BODY | {"n": 0}, headers=ID).status_code == 400
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.terminate()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    status, log = server.end()
    assert status == 0
    messages = [json.loads(line) for line in log.splitlines()]
    assert {"kvasir_runtime.server.launch", "kvasir_runtime.engine.core_main"} <= {each["logger"] for each in messages}
    assert [each["status"] for each in messages if each.get("request_id") == ID["x-request-id"]] == [400]


def test_drafts_that_hold_change_no_text(plain_server, drafting):
    servers = [plain_server, drafting]
    body = BODY | {"prompt": "to be or not to be or not to be or", "max_tokens": 200}
    plain, drafted = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for server in servers]
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert [num_accepted(server) > 0 for server in servers] == [False, True]


def num_accepted(server) -> float:
    """Of draft tokens."""
    series = re.compile(r"^kvasir_spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", re.MULTILINE)
    return sum(float(value) for value in series.findall(httpx.get(f"{server.url}/metrics").text))


def test_an_engine_core_that_is_stopped_makes_the_server_unhealthy_until_it_goes_on(drafting):
    server = drafting
    core = server.engine_core()
    os.kill(core, signal.SIGSTOP)
    message = wait_for_status(server, "/health", 503).json()["error"]["message"]
    assert float(re.findall(r"no sign of life for (\d+) seconds", message)[0]) >= SILENT_SECONDS
    os.kill(core, signal.SIGCONT)
    wait_for_status(server, "/ready", 200)


def test_an_engine_core_that_is_killed_fails_its_requests_and_the_program(drafting):
    """The last test of this server."""
    server = drafting
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(server.engine_core(), signal.SIGKILL)
        rest = "\n".join(lines)
    assert "engine core" in rest
    status, log = server.end()
    assert status == 1
    assert "its process ended with status -9" in log


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def wait_for_status(server, path: str, status: int) -> httpx.Response:
    """Each time over a connection of its own, which a stopped process never takes."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if (response := httpx.get(server.url + path, timeout=1)).status_code == status:
                return response
        except httpx.TimeoutException:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{path} never answered {status}")


def test_a_port_in_use_is_told_before_anything_is_loaded(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serve("--port", str(port))
        status, log = server.end()
    assert status == 2
    assert f"cannot listen on 127.0.0.1:{port}" in log
    assert "choose another --port" in log


def test_a_port_for_kv_events_in_use_is_told_by_name_and_ends_with_1(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        server = serve("--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint}))
        status, log = server.end()
    assert status == 1
    assert f"--kv-events-config: cannot listen on endpoint {endpoint}: Address already in use" in log
    assert "Traceback" not in log


def test_an_unknown_flag_is_an_error_that_names_the_nearest(serve):
    status, log = serve("--max-num-seq", "4").end()
    assert status == 2
    assert "unknown argument --max-num-seq; did you mean --max-num-seqs?" in log


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-batched-tokens", "0"),
        ("--gpu-memory-utilization", "1.5"),
        ("--speculative-config", '{"method": "eagle"}'),
        ("--speculative-config", '{"method": "ngram", "k": 4}'),
        ("--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 0}'),
    ],
)
def test_a_value_that_cannot_work_is_an_error_of_the_first_second(model_folder, flags, capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", str(model_folder), *flags])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flags[0] in line


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path)])
    assert end.value.code == 2
    assert f"MODEL is {tmp_path}, which has no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path / "nothing")])
    assert "nothing, which does not exist; give the folder" in capsys.readouterr().err


def test_a_model_that_lies_in_a_hub_is_fetched_and_known_by_its_name_there(serve, model_folder, tmp_path, monkeypatch):
    with running_hub() as hub:
        hub.repositories["org/tiny"] = Repository({file.name: file.read_bytes() for file in model_folder.iterdir()})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        server = serve("--download-dir", str(tmp_path), folder=Path("org/tiny")).wait_ready()
    [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["id"], model["root"]) == ("org/tiny", str(tmp_path / "org" / "tiny"))


def test_a_checkpoint_with_a_missing_tensor_is_an_error_that_names_it(serve, model_folder, tmp_path):
    broken = Path(shutil.copytree(model_folder, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    status, log = serve(folder=broken).end()
    assert status == 1
    assert "model.layers.1.mlp.up_proj.weight" in log
    assert "Traceback" not in log
