"""The whole path: a manifest, real processes, the OpenAI client library, and answers equal to Hugging Face's."""

import json
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from examples.quickstart import stream_answer
from tests.docs.commands import Command, documented
from tests.local import chats
from tests.local.chats import CHATS
from tests.local.conftest import LocalService

ask, stream = partial(chats.ask, "quickstart"), partial(chats.stream, "quickstart")


def test_the_model_is_listed(quickstart):
    assert [model.id for model in quickstart.client().models.list()] == ["quickstart"]


@pytest.mark.parametrize("command", documented("curl http://127.0.0.1:8080"), ids=str)
def test_a_curl_of_the_documentation_is_answered(quickstart: LocalService, command: Command) -> None:
    text = command.text.replace("curl http://127.0.0.1:8080", f"curl --silent --show-error --fail {quickstart.url}")
    text = text.replace('"qwen"', '"quickstart"')
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.get("data") or answer["choices"][0]["message"]["content"]


def test_make_run_streams_its_answer(quickstart: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    """What examples/quickstart.py does once its service is ready."""
    stream_answer(quickstart.client())
    assert "def factorial(n" in capsys.readouterr().out


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_is_answered_as_hugging_face_answers_it(quickstart, expected, chat):
    assert ask(quickstart.client(), chat) == expected[chat]


@pytest.mark.parametrize("chat", CHATS)
def test_a_streamed_answer_is_the_same(quickstart, expected, chat):
    assert stream(quickstart.client(), chat) == expected[chat]


def test_32_requests_at_once_get_the_same_answers(quickstart, expected):
    client = quickstart.client()
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda index: (stream if index % 2 else ask)(client, CHATS[index % 3]), range(32)))
    assert answers == [expected[CHATS[index % 3]] for index in range(32)]


def test_bad_requests_are_told_so_and_harm_nobody(quickstart, expected):
    client, answers = quickstart.client(), []
    neighbours = [threading.Thread(target=lambda: answers.append(stream(client, CHATS[0]))) for _ in range(4)]
    for neighbour in neighbours:
        neighbour.start()
    message = [{"role": "user", "content": "hello"}]
    good = {"model": "quickstart", "messages": message}
    bad_bodies = {
        b"{not json": 400,
        b'{"model": "quickstart", "messages": "\xff\xfe"}': 400,
        json.dumps(good | {"messages": []}).encode(): 400,
        json.dumps(good | {"max_tokens": -1}).encode(): 400,
        json.dumps(good | {"max_tokens": 10**9}).encode(): 400,
        json.dumps(good | {"n": 10**6}).encode(): 400,
        json.dumps(good | {"temperature": "hot"}).encode(): 400,
        json.dumps(good | {"top_z": 1}).encode(): 400,
        json.dumps(good | {"model": "nobody"}).encode(): 404,
        json.dumps(good | {"messages": [{"role": "user", "content": "a " * 5000}]}).encode(): 400,
    }
    for body, status in bad_bodies.items():
        answer = httpx.post(f"{quickstart.url}/v1/chat/completions", content=body, timeout=60)
        assert answer.status_code == status, body[:80]
        assert answer.json()["error"]["message"], body[:80]
    for neighbour in neighbours:
        neighbour.join()
    assert answers == [expected[CHATS[0]]] * 4


def test_an_engine_that_is_killed_is_restarted(quickstart, expected):
    before = {pid for pid, command in quickstart.processes().items() if "kvasir-runtime serve" in command}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    answer = ask(quickstart.client(), CHATS[0])  # held by the router until an engine is there again
    assert answer == expected[CHATS[0]]
    after = {pid for pid, command in quickstart.processes().items() if "kvasir-runtime serve" in command}
    assert after
    assert not before & after


def test_sigterm_leaves_no_process_behind(quickstart):
    """The last that is asked of it."""
    assert len(quickstart.processes()) >= 4, "operator, router, engine's API process, engine core"
    assert quickstart.stop() == 0, "".join(quickstart.lines)
    assert quickstart.processes() == {}
