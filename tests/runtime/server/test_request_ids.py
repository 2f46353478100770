"""The x-request-id of an HTTP request reaches the core once, however many prompts and sequences it brings; every answer
has one, and the log names it with what was refused."""

import logging

import pytest

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.server.middleware import MAX_REQUEST_ID_CHARS

ID = {"x-request-id": "router-7"}


def received_ids(running) -> list[str | None]:
    return [request.http_request_id for request in running.core.received]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "a", "n": 3}, ["router-7"]),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, ["router-7", None, None]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}, ["router-7"]),
    ],
)
def test_an_http_request_arrives_once(start_server, path, body, expected) -> None:
    with start_server() as running:
        assert running.http.post(path, json=body | {"max_tokens": 1}, headers=ID).status_code == 200
        assert received_ids(running) == expected


def test_a_request_without_an_id_has_none(start_server) -> None:
    with start_server() as running:
        running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert received_ids(running) == [None]


@pytest.mark.parametrize(("length", "is_told"), [(MAX_REQUEST_ID_CHARS, True), (MAX_REQUEST_ID_CHARS + 1, False)])
def test_an_id_of_undue_length_is_not_repeated_to_routers(start_server, length: int, is_told: bool) -> None:
    request_id = "x" * length
    with start_server() as running:
        body = {"prompt": "a", "max_tokens": 1}
        running.http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        assert received_ids(running) == [request_id if is_told else None]


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 200), ("/v1/completions", 405), ("/nowhere", 404)])
def test_every_answer_repeats_the_clients_id(running, path: str, status: int) -> None:
    answer = running.http.get(path, headers=ID)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "router-7")


@pytest.mark.parametrize("given", [None, "", "x" * (MAX_REQUEST_ID_CHARS + 1), "a\tb"])
def test_an_answer_to_a_request_without_a_usable_id_has_one_of_its_own(running, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    answers = [
        running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers) for _ in range(2)
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.json()["id"] for answer in answers] == [f"cmpl-{each}" for each in ids]
    assert ids[0] != ids[1]
    assert given not in ids


def test_a_stream_has_an_id(running) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    assert running.http.post("/v1/completions", json=body, headers=ID).headers["x-request-id"] == "router-7"


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("middleware")]


def ids_of(caplog: pytest.LogCaptureFixture, name: str) -> set[str]:
    """Of the requests that messages of this logger are about."""
    return {record.__dict__["request_id"] for record in caplog.records if record.name.endswith(name)}


def test_refused_requests_are_logged_with_their_id_and_why(start_server, caplog: pytest.LogCaptureFixture) -> None:
    keyed = {**ID, "Authorization": "Bearer secret"}
    with start_server(config=ServerConfig(api_key="secret")) as running, caplog.at_level(logging.INFO):
        running.http.post("/v1/completions", json={"prompt": "a"}, headers=ID)
        running.http.post("/v1/completions", json={"prompt": "a", "n": 0}, headers=keyed)
        running.http.get("/a%0Ab", headers=keyed)
        running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=keyed)
    lines = refusals(caplog)
    assert [line.split()[:3] for line in lines] == [
        ["POST", "/v1/completions", "401"], ["POST", "/v1/completions", "400"], ["GET", "/a%0Ab", "404"]
    ]  # fmt: skip
    assert lines[1].endswith("n: 0 was given, but it should be greater than or equal to 1")
    assert ids_of(caplog, "middleware") == {"router-7"}


def test_probes_that_fail_are_not_logged_again_and_again(start_server, caplog: pytest.LogCaptureFixture) -> None:
    with start_server(is_ready=False) as running, caplog.at_level(logging.INFO):
        assert running.http.get("/ready").status_code == 503
        assert running.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    assert [line.split()[:3] for line in refusals(caplog)] == [["POST", "/v1/completions", "503"]]


def test_a_stream_that_ends_with_an_error_is_logged(running, caplog: pytest.LogCaptureFixture) -> None:
    running.core.step_seconds = 0.01
    body = {"prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with caplog.at_level(logging.INFO), running.http.stream("POST", "/v1/completions", json=body, headers=ID) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.core.error = "no memory"
        assert any("no memory" in line for line in lines)
    assert any("no memory" in line for line in caplog.messages)
    assert ids_of(caplog, "exchange") == {"cmpl-router-7"}
