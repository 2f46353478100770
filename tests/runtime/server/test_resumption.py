"""A stream that is cut at any event and continued here adds up to the unbroken one."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.server.journal import COMMENT, MAX_JOURNAL_BYTES, Beginning, Entry, Move, read_journal
from kvasir_runtime.transfer.params import KvTransferParams

PROMPT = "the quick brown fox größer 日本語 😀 jumps over the lazy dog"
COMPLETION: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "stream": True, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
EVERYTHING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
KEEP = {"x-kvasir-resumable": "1"}

REQUESTS = {
    "completion": ("/v1/completions", COMPLETION),
    "completion-seed": ("/v1/completions", COMPLETION | {"seed": 7} | USAGE),
    "completion-logprobs": ("/v1/completions", COMPLETION | {"logprobs": 2} | EVERYTHING),
    "completion-echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 0, "return_token_ids": True}),
    "completion-echo-only": ("/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0, "logprobs": 1}),
    "completion-stop": ("/v1/completions", COMPLETION | {"stop": ["jumps ov", "lazy"], "max_tokens": 99} | USAGE),
    "completion-min-tokens": ("/v1/completions", COMPLETION | {"stop": "quick", "min_tokens": 5}),
    "completion-stop-shown": (
        "/v1/completions",
        COMPLETION | {"stop": ["jumps ov"], "include_stop_str_in_output": True, "max_tokens": 99},
    ),
    "completion-stop-token": (
        "/v1/completions",
        COMPLETION | {"stop_token_ids": list(range(60, 320)), "min_tokens": 9},
    ),
    "completion-several": ("/v1/completions", COMPLETION | {"prompt": [PROMPT, "lazy 😀"], "n": 2} | USAGE),
    "chat": ("/v1/chat/completions", CHAT | USAGE),
    "chat-seed": ("/v1/chat/completions", CHAT | {"seed": 7, "ignore_eos": True} | EVERYTHING),
    "chat-logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    "chat-several": ("/v1/chat/completions", CHAT | {"n": 3} | EVERYTHING),
}


def stream(running, path: str, body: dict[str, Any], journal: bytes = b"") -> list[bytes]:
    """The blocks of a stream with a journal, continued from one that is given."""
    content = json.dumps(body).encode()
    headers = KEEP | ({"x-kvasir-journal-at": str(len(content))} if journal else {})
    response = running.http.post(path, content=content + journal, headers=headers)
    assert (response.status_code, response.headers["x-kvasir-resumable"]) == (200, "1"), response.text
    return response.content.split(b"\n\n")[:-1]


def split(blocks: list[bytes]) -> tuple[bytes, list[dict[str, Any]]]:
    """The journal's lines, and the events without [DONE]."""
    lines, events = b"", []
    for block in blocks:
        if block.startswith(COMMENT):
            line, _, block = block.partition(b"\n")
            lines += line.removeprefix(COMMENT) + b"\n"
        if block and block != b"data: [DONE]":
            events.append(json.loads(block.removeprefix(b"data: ")))
    return lines, events


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events joined by choice: how many tokens come in one event depends on the moment."""
    texts: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = texts.setdefault(choice["index"], {})
            for key, value in flat(choice).items():
                whole[key] = joined(whole.get(key), value)
    last = events[-1]
    others = {key: value for key, value in last.items() if key != "choices"}
    num_without_choice = sum(not event["choices"] for event in events)
    ids = {(event["id"], event["created"]) for event in events}
    return {"choices": texts, "last": others, "num_without_choice": num_without_choice, "ids": ids}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key, item in value.items() for name, leaf in flat(item, f"{prefix}.{key}").items()}


def joined(before: Any, value: Any) -> Any:
    if isinstance(value, str | list) and type(before) is type(value) and before != "assistant":
        return before + value
    return before if value is None else value


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_cut_at_any_event_and_continued_adds_up_to_the_whole(running, name: str) -> None:
    running.core.num_cached_tokens = 3
    path, body = REQUESTS[name]
    blocks = stream(running, path, body)
    _, whole = split(blocks)
    assert any(event["choices"] for event in whole)
    for cut in range(1, len(blocks)):
        journal, before = split(blocks[:cut])
        rest = stream(running, path, body, journal)
        assert rest[-1] == b"data: [DONE]"
        assert added_up(before + split(rest)[1]) == added_up(whole), f"cut after {cut} blocks"


def test_a_continued_stream_keeps_spaces_and_characters_that_a_decoder_needs_context_for(sentencepiece) -> None:
    body = {"prompt": "日本 and 😀", "max_tokens": 17, "stream": True, "echo": True}
    blocks = stream(sentencepiece, "/v1/completions", body)
    whole = added_up(split(blocks)[1])
    assert whole["choices"][0][".text"] == "日本 and 😀 日本 and 😀"
    for cut in range(1, len(blocks)):
        journal, before = split(blocks[:cut])
        rest = stream(sentencepiece, "/v1/completions", body, journal)
        assert added_up(before + split(rest)[1]) == whole, f"cut after {cut} blocks"


def test_a_stream_with_a_journal_differs_from_one_without_by_its_comments_only(running) -> None:
    running.core.step_seconds = 0.005
    path, body = REQUESTS["chat-seed"]
    plain = running.http.post(path, json=body).content.split(b"\n\n")[:-2]
    kept = split(stream(running, path, body))[1]
    events = [json.loads(block.removeprefix(b"data: ")) for block in plain]
    assert added_up(kept)["choices"] == added_up(events)["choices"]
    assert not any(block.startswith(b":") for block in plain)


def test_only_what_is_missing_is_generated_and_under_the_same_seeds(running) -> None:
    path, body = REQUESTS["completion-several"]
    blocks = stream(running, path, body)
    begun = list(running.core.received)
    journal, events = split(blocks[: len(blocks) // 2])
    running.core.received.clear()
    stream(running, path, body, journal)
    assert seeds_of(running.core.received) <= seeds_of(begun)
    assert all(start.output_token_ids for request in running.core.received for start in request.sequences)
    assert {request.arrival_time for request in running.core.received} == {float(events[0]["created"])}


def seeds_of(received: list[AddRequest]) -> set[int]:
    return {start.seed for request in received for start in request.sequences}


def test_a_stream_may_be_continued_twice(running) -> None:
    path, body = REQUESTS["completion-logprobs"]
    blocks = stream(running, path, body)
    first, before = split(blocks[:5])
    second, more = split(stream(running, path, body, first)[:4])
    rest = split(stream(running, path, body, first + second))[1]
    assert added_up(before + more + rest) == added_up(split(blocks)[1])


BEGINNING = b'{"request_id":"a","created":1,"seeds":[1],"model":"%s"}\n'


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (b"[0,[5]]\n", None),
        (b"[1,[5]]\n", "sequence 1"),
        (b"[-1,[5]]\n", "sequence -1"),
        (b"[0,[100000]]\n", "token id 100000"),
        (b"[0,[-1]]\n", "token id -1"),
        (b"[0,[1,2,3,4]]\n", "4 tokens of sequence 0 and no end"),
        (b"[0,5]\n", "cannot be read"),
        (b"nonsense", "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_journal_that_is_not_of_this_request_is_refused(running, entries: bytes, expected: str | None) -> None:
    journal = BEGINNING % running.model_digest.encode() + entries
    response = ask(running, journal)
    assert response.status_code == (200 if expected is None else 400)
    assert (expected or "data: [DONE]") in response.text


def test_a_stop_string_in_the_journal_is_refused(running) -> None:
    ids = running.tokenizer.encode("the quick").ids
    journal = BEGINNING % running.model_digest.encode() + b"[0,%s]\n" % json.dumps(ids).encode()
    response = ask(running, journal, stop="quick", max_tokens=99)
    assert response.status_code == 400
    assert "stop string 'quick'" in response.text


def test_a_journal_of_a_request_that_is_no_stream_is_refused(running) -> None:
    response = ask(running, BEGINNING % running.model_digest.encode(), stream=False)
    assert (response.status_code, "continues streams only" in response.text) == (400, True)


def test_another_models_stream_is_not_continued(running) -> None:
    response = ask(running, BEGINNING % b"other")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "other_model")


def test_a_journal_of_another_number_of_prompts_is_refused(running) -> None:
    journal = b'{"request_id":"a","created":1,"seeds":[1,2],"model":"%s"}\n' % running.model_digest.encode()
    response = ask(running, journal)
    assert response.status_code == 400
    assert "the journal is of 2 prompts, not 1" in response.text


@pytest.mark.parametrize("beginning", [b'"created":1,"seeds":[-1]', b'"created":1,"seeds":[%d]' % 2**64])
def test_a_seed_that_no_engine_draws_is_refused(running, beginning: bytes) -> None:
    journal = b'{"request_id":"a",%s,"model":"%s"}\n' % (beginning, running.model_digest.encode())
    response = ask(running, journal)
    assert response.status_code == 400
    assert "seed" in response.text


@pytest.mark.parametrize("at", ["-1", "x", "100000", "1.5", "1" * 5000])
def test_a_journal_beyond_the_body_is_refused(running, at: str) -> None:
    response = running.http.post("/v1/completions", json=COMPLETION, headers={"x-kvasir-journal-at": at})
    assert response.status_code == 400
    assert "x-kvasir-journal-at" in response.text


def ask(running, journal: bytes, **options: Any) -> Any:
    body = json.dumps(COMPLETION | {"max_tokens": 4} | options).encode()
    headers = {"x-kvasir-journal-at": str(len(body))}
    return running.http.post("/v1/completions", content=body + journal, headers=headers)


def received_when(act: Callable[[], object], running, headers: dict[str, str]) -> bytes:
    """All of a stream in the middle of which `act` happens."""
    received = b""
    body = COMPLETION | {"max_tokens": 400}
    with running.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        for chunk in response.iter_bytes():
            if not received:
                act()
            received += chunk
    return received


@pytest.mark.parametrize("trouble", ["dies", "stops"])
@pytest.mark.parametrize("headers", [KEEP, {}])
def test_streams_with_a_journal_just_stop_when_the_engine_ends_and_others_hear_why(
    start_server, trouble: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with start_server(shutdown_timeout=0.1) as running:
        running.core.step_seconds = 0.01
        act = running.core.die if trouble == "dies" else running.stop
        received = received_when(act, running, headers)
    assert (b'"error"' in received, b"data: [DONE]" in received) == ((False, False) if headers else (True, True))
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_whole_answers_that_outlast_the_drain_are_sent_to_another_replica(start_server) -> None:
    with start_server(shutdown_timeout=0.1) as running:
        running.core.is_hanging = True
        with ThreadPoolExecutor() as pool:
            body = COMPLETION | {"stream": False}
            waiting = pool.submit(running.http.post, "/v1/completions", json=body)
            running.core.wait_until(lambda core: core.received)
            running.stop()
            response = waiting.result(10)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("num_too_many", "status"), [(0, 400), (1, 413)])
def test_a_body_at_the_limit_has_room_for_its_journal(start_server, num_too_many: int, status: int) -> None:
    with start_server(config=ServerConfig(max_body_bytes=1000)) as running:
        journal = b"x" * (MAX_JOURNAL_BYTES + num_too_many)  # what is read, and then is no journal
        headers = {"x-kvasir-journal-at": "1000"}
        response = running.http.post("/v1/completions", content=b" " * 1000 + journal, headers=headers)
        assert response.status_code == status


def test_a_hand_over_begins_no_sequence_that_has_ended_again() -> None:
    place = KvTransferParams(do_remote_prefill=True, remote_host="10.0.0.1", remote_port=5600, transfer_id="t")
    lines = [Beginning("c", 1, [1], "m"), Entry(0, [5], "length"), Entry(1, [6]), Move(0, [], moved=place)]
    journal = read_journal(b"\n".join(map(msgspec.json.encode, lines)))
    assert {index: each.finish_reason for index, each in journal.sequences.items()} == {0: "length", 1: None}
    assert journal.moved == place
