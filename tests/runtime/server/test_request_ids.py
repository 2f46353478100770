"""The x-request-id of an HTTP request reaches the core once, however many prompts and sequences it brings."""

import pytest

from kvasir_runtime.server.serving import MAX_REQUEST_ID_CHARS

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
