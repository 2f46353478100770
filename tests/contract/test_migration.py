"""Two real decode engines behind a real router: a stream whose engine is to stop goes on in the other one from the same
KV, and its client sees one unbroken stream of the right tokens."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.runtime.cli.conftest import Server, a_free_port, free_ports_in_a_row

MODEL = Path("examples/models/kvasir-python-700k")
PROMPT = Path("runtime/kvasir_runtime/scheduling/planner.py").read_text()[:600]
BODY = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SAMPLED = BODY | {"temperature": 0.9, "top_p": 0.95, "seed": 7}
ROUTER = str(Path(sys.executable).parent / "kvasir-router")


@dataclass
class Router:
    url: str
    log_file: Path

    def has_asked_to_hand_over(self, engine: Server) -> bool:
        return f"{engine.url} asked to hand it over: 202" in self.log_file.read_text()


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """Indirect parameter: flags of both."""
    servers = []
    for _ in range(2):
        extra = {"side_channel_host": "127.0.0.1", "side_channel_port": free_ports_in_a_row(2)}
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}
        flags = ("--kv-transfer-config", json.dumps(config), "--dtype", "float32", "--max-num-seqs", "8")
        servers.append(Server(MODEL, *flags, *request.param))
    try:
        yield [server.wait_ready() for server in servers]
    finally:
        for server in servers:
            server.process.kill()
            server.end()


@pytest.fixture
def router(engines: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    port = a_free_port()
    log_file = tmp_path_factory.mktemp("router") / "log"
    endpoints = [flag for engine in engines for flag in ("--decode-endpoint", engine.url)]
    command = [ROUTER, "serve", "--port", str(port), "--admin-port", "0", "--probe-interval", "100ms", *endpoints]
    with log_file.open("w") as log:
        process = subprocess.Popen([*command, "--log-level", "debug"], stderr=log)
    try:
        yield Router(f"http://127.0.0.1:{port}", log_file)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("engines", "body"),
    [((), BODY), ((), SAMPLED), (("--tensor-parallel-size", "2"), BODY), (("--data-parallel-size", "2"), BODY)],
    indirect=["engines"],
    ids=["greedy", "sampled", "tensor ranks", "data ranks"],
)
def test_a_stream_goes_on_elsewhere_when_its_engine_is_told_to_stop(
    engines: list[Server], router: Router, body: dict[str, Any]
) -> None:
    wait_for(lambda: answers(router.url))
    cores = [engine.engine_cores() for engine in engines]
    try:
        seen, events, old = a_stream_caught_under_way(engines, cores, router, body)
        old.process.terminate()
        wait_for(lambda: router.has_asked_to_hand_over(old))
    finally:
        signal_all(chain(*cores), signal.SIGCONT)
    (new,) = [engine for engine in engines if engine is not old]
    for tokens in events:
        seen += tokens
    whole = httpx.post(f"{new.url}/v1/completions", json=body, timeout=120).json()
    assert seen == whole["choices"][0]["token_ids"]
    assert len(set(seen)) > 1
    assert old.process.wait(20) == 0
    num_pulled = total(new, "kvasir_kv_transfer_blocks_total", direction="received")
    assert num_pulled >= whole["usage"]["prompt_tokens"] // 16, "what was written before is there as well"
    assert total(new, "kvasir_kv_transfer_failures_total") == 0


def a_stream_caught_under_way(
    engines: list[Server], cores: list[list[int]], router: Router, body: dict[str, Any]
) -> tuple[list[int], Iterator[list[int]], Server]:
    """Its first tokens, its other events, and its engine, whose cores stand still, so it cannot end."""
    while True:
        events = token_events(router.url, body)
        seen = next(events)
        signal_all(chain(*cores), signal.SIGSTOP)
        for engine, own in zip(engines, cores, strict=True):
            if num_in_flight(engine) and is_drawing(engine):
                signal_all(chain(*(others for others in cores if others != own)), signal.SIGCONT)
                return seen, events, engine
        signal_all(chain(*cores), signal.SIGCONT)  # it had ended already


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def token_events(url: str, body: dict[str, Any]) -> Iterator[list[int]]:
    """Token ids, event by event, of a stream that must end well."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=120) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        for line in lines:
            if line == "[DONE]":
                return
            yield json.loads(line)["choices"][0]["token_ids"]
    raise AssertionError("the stream ended in the middle")


def answers(url: str) -> bool:
    try:
        body = BODY | {"max_tokens": 1, "prompt": "x"}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx.ConnectError:
        return False


def num_in_flight(engine: Server) -> int:
    return int(httpx.get(f"{engine.url}/drain").json()["in_flight_requests"])


def is_drawing(engine: Server) -> bool:
    """Its cores, which stand still: by its last word, once the API process has read all that came before. What it has
    drawn may be on its way to the client long after the last token.
    """
    known: list[float] = []
    while known != (known := core_figures(engine)):
        time.sleep(0.1)
    return known[0] > 0


def core_figures(engine: Server) -> list[float]:
    families = text_string_to_metric_families(httpx.get(f"{engine.url}/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return [values["kvasir_num_requests_running"], values["kvasir_generation_tokens_total"]]


def total(server: Server, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
