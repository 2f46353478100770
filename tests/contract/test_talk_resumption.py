"""A trained model behind a real router, all processes: the engine that serves is killed, and what it was saying goes on
in the other, in each API: thoughts, calls of tools with their ids and answers of a form, as if nothing had happened.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from threading import Barrier, Event
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tests.contract.engines import signal_all, wait_for
from tests.plain_http import CLIENT
from tests.runtime.cli.conftest import Server, a_free_port, running_servers
from tests.runtime.server.test_responses_api import added_up as responses_added_up
from tests.runtime.server.test_responses_api import events_of
from tests.runtime.server.test_tools import joined_calls

from kvasir_router.relay.body import BodyBudget
from kvasir_router.relay.journal import Journal

MODEL = Path("examples/models/kvasir-caller")
ROUTER = str(Path(sys.executable).parent / "kvasir-router")
QUESTION, TWO_QUESTIONS = (
    [{"role": "user", "content": f"What is the time in {cities}?"}] for cities in ("Oslo", "Oslo and Rome")
)
NUM_LAYERS = 40
LONG = {"type": "string", "minLength": 500, "maxLength": 520}
CITY = {"type": "object", "properties": {"city": LONG}, "required": ["city"], "additionalProperties": False}
ANY_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FORM = {"type": "json_schema", "name": "city", "schema": CITY}
DRAWN = {"temperature": 0.8, "seed": 7, "stream": True}
NAMES = ("weather", "time")


def function(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


CHAT = DRAWN | {"messages": QUESTION, "max_tokens": 600}
RESPONSES = DRAWN | {"input": QUESTION, "max_output_tokens": 600}
MESSAGES = DRAWN | {"model": "caller", "messages": QUESTION, "max_tokens": 600}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, calls": (
        "/v1/chat/completions",
        CHAT | {"messages": TWO_QUESTIONS, "temperature": 0, "min_tokens": 250,
                "tools": [function(name, ANY_CITY) for name in NAMES]},
    ),
    "chat, strict calls": (
        "/v1/chat/completions",
        CHAT | {"tools": [function(name, CITY, strict=True) for name in NAMES], "tool_choice": "auto"},
    ),
    "chat, schema": (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}, "n": 2},
    ),
    "responses, calls": (
        "/v1/responses",
        RESPONSES | {"tools": [{"type": "function", "name": name, "parameters": CITY} for name in NAMES],
                     "tool_choice": "required"},
    ),
    "responses, schema": ("/v1/responses", RESPONSES | {"text": {"format": FORM}}),
    "messages, calls": (
        "/v1/messages",
        MESSAGES | {"tools": [{"name": name, "input_schema": CITY} for name in NAMES], "tool_choice": {"type": "any"}},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fleet:
    """`url`: of the router, which gives requests to the engines by turns."""

    url: str
    admin_url: str
    engines: tuple[Server, Server]

    def is_known(self) -> bool:
        try:
            known = CLIENT.get(f"{self.admin_url}/endpoints").json()
        except httpx.TransportError:
            return False
        return [each["state"] for each in known] == ["ready", "ready"]

    def num_resumed(self) -> float:
        text = CLIENT.get(f"{self.admin_url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("kvasir_router_streams_resumed_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def deepened(folder: Path, num_layers: int) -> Path:
    """The model with layers that add nothing: it says the same, and so slowly that no stream ends before its engine."""
    for file in MODEL.iterdir():
        shutil.copy(file, folder)
    config, weights = json.loads((MODEL / "config.json").read_text()), load_file(MODEL / "model.safetensors")
    first = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    for layer in range(config["num_hidden_layers"], num_layers):
        for name, tensor in first.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name.replace(".0.", f".{layer}.", 1)] = tensor * 0 if adds else tensor.clone()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_servers(deepened(tmp_path_factory.mktemp("models"), NUM_LAYERS)) as start:
        engines = start("--served-model-name", "caller"), start("--served-model-name", "caller")
        for engine in engines:
            engine.wait_ready()
        ports = a_free_port(), a_free_port()
        endpoints = [word for engine in engines for word in ("--endpoint", engine.url)]
        told = ("--policy", "roundRobin", "--port", str(ports[0]), "--admin-port", str(ports[1]))
        with subprocess.Popen([ROUTER, "serve", *told, *endpoints], stderr=subprocess.DEVNULL) as router:
            fleet = Fleet(*(f"http://127.0.0.1:{port}" for port in ports), engines)
            try:
                wait_for(fleet.is_known)
                yield fleet
            finally:
                router.kill()


@dataclass(frozen=True)
class Stream:
    case: str
    request_id: str
    asked_at: float
    received: bytes

    def whole(self) -> dict[str, Any]:
        return whole(self.case, self.received)

    def undisturbed(self, engine: Server) -> list[dict[str, Any]]:
        """What one engine says behind a chat's opening, which a stream that has begun has; where it is not told when
        this was begun, of each second that it may have been."""
        path, body = CASES[self.case]
        content = json.dumps(body).encode()
        kept = {"x-request-id": self.request_id, "x-kvasir-resumable": "1", "content-type": "application/json"}
        at = kept | {"x-kvasir-journal-at": str(len(content))}
        with CLIENT.stream("POST", engine.url + path, content=content, headers=kept) as answer:
            first = next(answer.iter_lines())
        shown = re.search(rb'"id": ?"([^"]+)"', self.received)
        assert shown is not None
        beginning = json.loads(first.removeprefix(": kvasir ")) | {"request_id": shown[1].decode()}
        blocks = self.received.split(b"\n\n")
        opening = b"".join(block + b"\n\n" for block in blocks if b'"delta":{"role":"assistant"' in block)
        told = re.search(rb'"created(?:_at)?": ?([0-9]+)', self.received)
        found = []
        for created in [int(told[1])] if told else range(int(self.asked_at), int(self.asked_at) + 3):
            line = json.dumps(beginning | {"created": created}).encode() + b"\n"
            answered = CLIENT.post(engine.url + path, content=content + line, headers=at)
            assert answered.status_code == 200, answered.text
            found.append(whole(self.case, opening + Journal(BodyBudget(2**20)).split(answered.content)[0]))
        return found


def stream(fleet: Fleet, case: str, number: int, is_answered: Event, have_begun: Barrier) -> Stream:
    """`have_begun` is waited at behind the first events."""
    path, body = CASES[case]
    request_id, asked_at, received = f"{case} {number}", time.time(), b""
    headers = {"x-request-id": request_id}
    with httpx.stream("POST", fleet.url + path, json=body, headers=headers, timeout=60) as answer:
        is_answered.set()
        assert answer.status_code == 200, answer.read()
        is_waiting = True
        for chunk in answer.iter_raw():
            received += chunk
            if is_waiting and received.count(b"delta") > 20:
                is_waiting = False
                have_begun.wait(60)
    assert not is_waiting
    return Stream(case, request_id, asked_at, received)


def whole(case: str, received: bytes) -> dict[str, Any]:
    """A stream's events added up: how much comes with one depends on the moment."""
    path, _ = CASES[case]
    if path == "/v1/responses":
        return responses_added_up(events_of(received))
    events = [json.loads(line.removeprefix("data: ")) for line in received.decode().splitlines() if "data: {" in line]
    return joined_calls(events) if path == "/v1/chat/completions" else messages_added_up(events)


def messages_added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    texts: dict[str, str] = {}
    others = []
    for event in events:
        if event["type"] != "content_block_delta":
            others.append(event)
            continue
        for kind, text in event["delta"].items():
            place = f"{event['index']} {kind}"
            texts[place] = texts.get(place, "") + text if kind != "type" else text
    return {"texts": texts, "others": others}


@pytest.fixture(scope="module")
def streams(fleet: Fleet) -> list[Stream]:
    """Two of each case, one by each engine, of which one is killed when all are under way."""
    have_begun, killed = Barrier(2 * len(CASES) + 1), fleet.engines[0]
    with ThreadPoolExecutor(2 * len(CASES)) as clients:
        futures: list[Future[Stream]] = []
        for case in CASES:
            for number in range(2):
                is_answered = Event()
                futures.append(clients.submit(stream, fleet, case, number, is_answered, have_begun))
                assert is_answered.wait(60)
        have_begun.wait(60)
        signal_all((*killed.children(), killed.process.pid), SIGKILL)
        return [future.result() for future in futures]


def test_each_stream_of_the_killed_engine_went_on(streams: list[Stream], fleet: Fleet) -> None:
    """But for those that had ended already, where a machine was slow to ask for all."""
    assert len(CASES) // 2 <= fleet.num_resumed() <= len(CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_what_one_engine_says(streams: list[Stream], fleet: Fleet, case: str) -> None:
    for one in streams:
        if one.case == case:
            assert one.whole() in one.undisturbed(fleet.engines[1])


def test_calls_and_forms_end_as_they_should(streams: list[Stream]) -> None:
    """Those of one API, which the others' are made of."""
    for one in streams:
        match one.case:
            case "chat, strict calls":
                calls, choice = one.whole()["calls"], one.whole()["choices"][0]
                names = {key: text for (_, _, key), text in calls.items()}
                assert choice[".finish_reason"] == "tool_calls", choice
                assert names["name"] in NAMES
                assert re.fullmatch("call_[0-9a-f]{24}", names["id"])
                assert len(json.loads(names["arguments"])["city"]) >= 500
            case "chat, schema":
                for choice in one.whole()["choices"].values():
                    assert choice[".finish_reason"] == "stop", choice
                    assert len(json.loads(choice[".delta.content"])["city"]) >= 500
