"""What a real router and a real engine are given as secrets is in none of their logs, pages, metrics and answers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.planted_secrets import leaks, planted
from tests.runtime.cli.conftest import Server, a_free_port

MODEL = Path("examples/models/kvasir-python-700k")
ROUTER = str(Path(sys.executable).parent / "kvasir-router")
DEBUG = ("--log-level", "debug")
CHAT = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 4}
ROUTER_PAGES = ("/metrics", "/endpoints", "/debug/routing", "/debug/routing.json", "/health", "/ready", "/openapi.json")
ENGINE_PAGES = ("/metrics", "/v1/models", "/load", "/health", "/ready", "/openapi.json", "/tokenizer")
SECRET_HEADER = "x-kvasir-router-secret"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Values by the environment variable that brings them; `key` is a client's, `wrong` one that nobody has."""
    names = ("KVASIR_ROUTER_SECRET", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    values = {name: planted(name.lower().replace("_", "-")) for name in names}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return {**values, "key": planted("key"), "wrong": planted("wrong")}


@pytest.fixture
def engine(given: dict[str, str]) -> Iterator[Server]:
    server = Server(MODEL, *DEBUG)
    yield server.wait_ready()
    server.process.kill()


class Router:
    def __init__(self, engine: Server, keys: Path, log: Path) -> None:
        ports = a_free_port(), a_free_port()
        self.url, self.admin_url = (f"http://127.0.0.1:{port}" for port in ports)
        self.log = log
        told = ("--port", str(ports[0]), "--admin-port", str(ports[1]), "--api-keys-file", str(keys))
        with log.open("w") as output:
            self.process = subprocess.Popen([ROUTER, "serve", *DEBUG, *told, "--endpoint", engine.url], stderr=output)


@pytest.fixture
def router(engine: Server, given: dict[str, str], tmp_path: Path) -> Iterator[Router]:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "acme").write_text(given["key"])
    router = Router(engine, tmp_path / "keys", tmp_path / "log")
    yield router
    router.process.kill()
    router.process.wait()


def test_no_secret_is_shown_by_router_or_engine(engine: Server, router: Router, given: dict[str, str]) -> None:
    shown = {"router's arguments": arguments(router.process.pid), "engine's arguments": arguments(engine.process.pid)}
    shown |= answers_to_clients(router, given)
    shown |= {f"router {path}": httpx.get(router.admin_url + path).text for path in ROUTER_PAGES}
    shown |= {f"engine {path}": httpx.get(engine.url + path).text for path in ENGINE_PAGES}
    trusted = httpx.get(engine.url + "/tokenizer", headers={SECRET_HEADER: given["KVASIR_ROUTER_SECRET"]})
    distrusted = httpx.get(engine.url + "/tokenizer", headers={SECRET_HEADER: given["wrong"]})
    assert (trusted.status_code, distrusted.status_code) == (200, 403)
    for process in (router.process, engine.process):
        process.terminate()
    router.process.wait(20)
    shown |= {"router's log": router.log.read_text(), "engine's log": engine.end()[1], "refusal": distrusted.text}
    assert all(shown[f"{program}'s log"] for program in ("router", "engine"))
    assert leaks(given.values(), shown) == []


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def answers_to_clients(router: Router, given: dict[str, str]) -> dict[str, str]:
    """To one with a key, once the router has found the engine, and to those that it turns away or cannot understand."""
    right, wrong = ({"Authorization": f"Bearer {given[name]}"} for name in ("key", "wrong"))
    chat = f"{router.url}/v1/chat/completions"
    deadline = time.monotonic() + 60
    while (answer := post(chat, right)) is None or answer.status_code != 200:
        assert time.monotonic() < deadline, router.log.read_text()
        time.sleep(0.1)
    refused = post(chat, wrong)
    assert refused is not None
    assert refused.status_code == 401
    odd = httpx.post(chat, content=b"{", headers=right)
    unknown = httpx.post(f"{router.url}/v1/none", json=CHAT, headers=right)
    streamed = httpx.post(chat, json=CHAT | {"stream": True}, headers=right, timeout=60)
    told = {"answer": answer, "401": refused, "bad JSON": odd, "404": unknown, "stream": streamed}
    return {name: json.dumps(dict(each.headers)) + each.text for name, each in told.items()}


def post(url: str, headers: dict[str, str]) -> httpx.Response | None:
    """None while nobody listens."""
    try:
        return httpx.post(url, json=CHAT, headers=headers, timeout=60)
    except httpx.TransportError:
        return None
