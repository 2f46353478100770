"""POST /abort_requests and POST /reset_prefix_cache, which the router alone may ask for."""

import json
import threading
from typing import Any

import pytest

BODY = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True}


def answer_while_aborted(running: Any, body: dict[str, Any], headers: dict[str, str], *names: str) -> Any:
    """What comes of a request when these names are aborted once it has begun."""
    answers: list[Any] = []
    running.core.step_seconds = 0.02
    thread = threading.Thread(
        target=lambda: answers.append(running.http.post("/v1/completions", json=body, headers=headers).json())
    )
    thread.start()
    running.core.wait_until(lambda core: len(core.received) == 1)
    assert running.http.post("/abort_requests", json={"request_ids": list(names)}).status_code == 200
    thread.join()
    return answers[0]


@pytest.mark.parametrize("name", ["cmpl-mine", "over-http"])
def test_a_request_is_ended_by_either_of_its_names(running, name: str) -> None:
    body = BODY | {"request_id": "mine", "n": 2}
    answer = answer_while_aborted(running, body, {"x-request-id": "over-http"}, "unknown", name)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
    assert answer["usage"]["completion_tokens"] < 2 * 400
    running.core.wait_until(lambda core: len(core.aborted) == 1)
    running.wait_idle()


def test_others_go_on(running) -> None:
    short = BODY | {"max_tokens": 5, "request_id": "mine"}
    answer = answer_while_aborted(running, short, {}, "cmpl-min", "mine", "cmpl-mine:0")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert running.core.aborted == []


def test_a_streams_last_event_says_that_it_was_aborted(running) -> None:
    running.core.step_seconds = 0.02
    with running.http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "request_id": "mine"}) as response:
        lines = response.iter_lines()
        next(lines)
        running.http.post("/abort_requests", json={"request_ids": ["cmpl-mine"]})
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("body", [b"", b"{}", b'{"request_ids": []}', b'{"request_ids": [5]}', b'{"request_id": "a"}'])
def test_a_body_without_names_is_refused(running, body: bytes) -> None:
    response = running.http.post("/abort_requests", content=body)
    assert response.status_code == 400
    assert "request_ids" in response.json()["error"]["message"]


def test_cached_prefixes_are_forgotten_when_asked(running) -> None:
    before = running.core.num_resets
    assert running.http.post("/reset_prefix_cache").status_code == 200
    running.core.wait_until(lambda core: core.num_resets == before + 1)
