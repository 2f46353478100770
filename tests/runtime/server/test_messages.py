"""POST /v1/messages and /v1/messages/count_tokens, asked through Anthropic's official client."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from tests.runtime.server.conftest import Running
from tests.runtime.server.test_tools import CITY, TEXTS, TIME, WEATHER, own_model

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.server.journal import COMMENT

__all__ = ["own_model"]  # a fixture
PROMPT = "größer 日本語 😀 the quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
HEADER = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f2e;"}


@pytest.fixture
def client(running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_text(running) -> str:
    return running.tokenizer.decode(running.core.received[-1].spec.prompt_token_ids, skip_special_tokens=False)


def test_an_answer_has_its_text_its_usage_and_the_reason_of_its_end(running, client) -> None:
    running.core.num_cached_tokens = 3
    message = client.messages.create(model="tiny", messages=MESSAGES, max_tokens=5)
    [block] = message.content
    assert (message.type, message.role, message.model, message.id[:4]) == ("message", "assistant", "tiny", "msg_")
    assert (block.type, block.text[:5]) == ("text", "user\n")  # the core repeats the prompt
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    num_prompt_tokens = len(running.core.received[0].spec.prompt_token_ids)
    assert message.usage.input_tokens == num_prompt_tokens - 3
    assert (message.usage.cache_read_input_tokens, message.usage.output_tokens) == (3, 5)


def test_a_request_has_an_id_where_the_client_looks_for_it(client) -> None:
    answer = client.messages.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "a"}
    )
    assert answer.request_id == "a"


def test_system_blocks_and_turns_become_the_prompt_that_chat_makes(running, client) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, text("Be kind.")]
    messages = [
        {"role": "user", "content": [text("Hi"), text("there")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}, text("Hello")]},
        {"role": "user", "content": "You?"},
    ]
    client.messages.create(model="tiny", system=system, messages=messages, max_tokens=1)
    assert prompt_text(running) == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nYou?<|im_end|>\n<|im_start|>assistant\n"
    )


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def test_turns_of_one_role_are_one_turn(running, client) -> None:
    messages = [*MESSAGES, {"role": "user", "content": "And now?"}]
    client.messages.create(model="tiny", messages=messages, max_tokens=1)
    assert prompt_text(running) == f"<|im_start|>user\n{PROMPT}\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_the_request_begins_is_continued(running, client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    client.messages.create(model="tiny", messages=messages, max_tokens=1)
    assert prompt_text(running).endswith("<|im_start|>assistant\nThe answer is")


def test_sampling_is_what_was_asked_for(running) -> None:
    ask(running, max_tokens=7, temperature=0.25, top_p=0.5, top_k=9, seed=5, min_p=0.125)
    sampling = running.core.received[0].spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.25, 0.5, 9)
    assert (sampling.seed, sampling.min_p) == (5, 0.125)


def test_a_stop_sequence_ends_the_answer_and_is_named(client) -> None:
    message = client.messages.create(model="tiny", messages=MESSAGES, max_tokens=99, stop_sequences=["nothing", "lo"])
    assert message.stop_reason == "end_turn"
    message = client.messages.create(model="tiny", messages=MESSAGES, max_tokens=99, stop_sequences=["zz", "quick"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "quick")
    assert message.content[0].text == "user\ngrößer 日本語 😀 the "


def test_a_bound_beyond_the_context_is_cut_to_it_and_the_end_says_so(running) -> None:
    message = ask(running, max_tokens=32000, ignore_eos=True).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == 512


def test_a_stream_adds_up_to_the_whole_message(running, client) -> None:
    running.core.num_cached_tokens = 2
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_events_come_in_their_order(running) -> None:
    events = events_of(ask(running, stream=True, max_tokens=6).content)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"]) == ([], None)
    assert begun["usage"]["input_tokens"] == len(running.core.received[0].spec.prompt_token_ids)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Each names its kind twice."""
    events = []
    for block in stream.replace(b"\n\r\n", b"\n\n").split(b"\n\n")[:-1]:
        kind, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert kind == b"event: " + event["type"].encode()
        events.append(event)
    return events


def ask(running, path: str = "/v1/messages", headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4} | options
    return running.http.post(path, json=body, headers=headers)


TOOLS = [
    {"name": name, "description": "...", "input_schema": {"type": "object", "properties": {}}}
    for name in ("weather", "time")
]


@pytest.fixture
def model(own_model: Running) -> Running:
    """It writes the last message's content."""
    own_model.core.received, own_model.core.aborted = [], []
    return own_model


def asked(content: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "tools": TOOLS, "max_tokens": 300} | options


def answer(model: Running, content: str, **options: Any) -> dict[str, Any]:
    response = model.http.post("/v1/messages", json=asked(content, **options))
    assert response.status_code == 200, response.text
    return response.json()


CALLED = {"type": "tool_use", "name": "weather", "input": json.loads(CITY)}
THOUGHT = {"type": "thinking", "thinking": "What now?"}


@pytest.mark.parametrize(
    ("written", "blocks", "stop_reason"),
    [
        ("Hello.", [text("Hello.")], "end_turn"),
        ("", [], "end_turn"),
        (f"I look.\n{WEATHER}", [text("I look."), CALLED], "tool_use"),
        (f"{WEATHER}\n{TIME}", [CALLED, {"type": "tool_use", "name": "time", "input": {}}], "tool_use"),
        ("<think>\nWhat now?\n</think>\n\nHello.", [THOUGHT, text("Hello.")], "end_turn"),
        (
            '<tool_call>{"name": "weather", "arguments": {"city" 1</tool_call>',
            [{"type": "tool_use", "name": "weather", "input": {"INVALID_JSON": '{"city" 1'}}],
            "tool_use",
        ),
    ],
)
def test_thoughts_text_and_calls_are_blocks(model, written: str, blocks: list[Any], stop_reason: str) -> None:
    message = answer(model, written)
    assert [without_ids(block) for block in message["content"]] == blocks
    assert message["stop_reason"] == stop_reason
    assert all(block.get("id", "call_").startswith("call_") for block in message["content"])


def without_ids(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in ("id", "signature")}


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "broken"])
def test_a_stream_of_blocks_adds_up_to_the_whole(model, name: str) -> None:
    whole = answer(model, TEXTS[name])
    with (
        anthropic.Anthropic(base_url=model.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="talking", **asked(TEXTS[name])) as stream,
    ):
        streamed = stream.get_final_message()
    blocks = [block.model_dump(exclude_none=True) for block in streamed.content]
    assert list(map(without_ids, blocks)) == list(map(without_ids, whole["content"]))
    assert streamed.stop_reason == whole["stop_reason"]
    assert [block.get("signature") for block in blocks] == [block.get("signature") for block in whole["content"]]


def test_a_call_that_is_cut_says_max_tokens(model) -> None:
    message = answer(model, WEATHER, max_tokens=55)
    [block] = message["content"]
    assert (block["type"], message["stop_reason"]) == ("tool_use", "max_tokens")
    assert CITY.startswith(block["input"]["INVALID_JSON"].rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "maybe"}, "tool_choice: an object of the type auto, any, none or tool"),
        ({"type": "tool"}, "tool_choice.name: a text is expected"),
        ({"type": "any", "disable_parallel_tool_use": "no"}, "tool_choice.disable_parallel_tool_use: true or false"),
        ({"type": "tool", "name": "nobody"}, "tool_choice names 'nobody', which is none of the tools"),
    ],
)
def test_a_wrong_choice_of_tools_is_refused(model, choice: dict[str, Any], told: str) -> None:
    response = model.http.post("/v1/messages", json=asked("Hi", tool_choice=choice))
    assert (response.status_code, told in response.json()["error"]["message"]) == (400, True), response.text


@pytest.mark.parametrize(("choice", "status"), [("any", 400), ("tool", 400), ("auto", 200), ("none", 200)])
def test_no_call_can_be_asked_for_without_tools(model, choice: str, status: int) -> None:
    body = asked("Hi", tool_choice={"type": choice, "name": "weather"}, tools=[], max_tokens=1)
    assert model.http.post("/v1/messages", json=body).status_code == status


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_is_asked_for_is_forced_and_ends_as_one(model, choice: dict[str, Any]) -> None:
    assert answer(model, WEATHER, tool_choice=choice)["stop_reason"] == "tool_use"
    assert model.core.received[0].spec.grammar is not None


def test_without_a_choice_of_tools_text_stays_text(model) -> None:
    assert answer(model, WEATHER, tool_choice={"type": "none"})["content"] == [text(WEATHER)]


def test_one_call_is_answered_where_no_more_are_wanted(model) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    [block] = answer(model, f"{WEATHER}\n{TIME}", tool_choice=choice)["content"]
    assert block["name"] == "weather"


def test_tools_of_anthropics_own_servers_are_refused(model) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    response = model.http.post("/v1/messages", json=asked("Hi", tools=[tool]))
    assert (response.status_code, "runs at Anthropic only" in response.text) == (400, True)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("input_schema", "x", "tools[0].input_schema: an object is expected"),
        ("description", 3, "tools[0].description: a text is expected"),
        ("strict", "yes", "tools[0].strict: true or false is expected"),
        ("name", None, "tools[0].name: a text is expected"),
    ],
)
def test_what_is_wrong_of_a_tool_is_told_in_the_words_of_this_api(model, key: str, value: Any, told: str) -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}, key: value}
    response = model.http.post("/v1/messages", json=asked("Hi", tools=[tool]))
    assert (response.status_code, response.json()["error"]["message"]) == (400, told)


def test_thinking_can_be_switched_off(model) -> None:
    answer(model, "Hello.", thinking={"type": "disabled"})
    assert prompt_text(model).startswith("<think></think>")


def test_a_budget_ends_a_thought(model) -> None:
    answer(model, "Hello.", thinking={"type": "enabled", "budget_tokens": 7})
    chat = {"messages": [{"role": "user", "content": "Hello."}], "thinking_token_budget": 7}
    model.http.post("/v1/chat/completions", json=chat)
    ours, theirs = (received.spec.grammar for received in model.core.received)
    assert ours is not None
    assert ours == theirs


@pytest.mark.parametrize("name", ["calls behind text", "thought and calls", "broken"])
def test_a_stream_of_blocks_cut_anywhere_and_continued_adds_up_to_the_whole(model, name: str) -> None:
    options = asked(TEXTS[name], stream=True)
    blocks = with_journal(model, b"", options)
    whole = split(blocks)[1]
    for cut in range(1, len(blocks)):
        journal, before = split(blocks[:cut])
        rest = split(with_journal(model, journal, options))[1]
        assert added_up(before + rest) == added_up(whole), f"cut after {cut} blocks"


def test_a_stream_cut_at_any_block_and_continued_adds_up_to_the_whole(running) -> None:
    running.core.num_cached_tokens = 3
    options: dict[str, Any] = {"stream": True, "max_tokens": 24, "stop_sequences": ["fox"], "seed": 3}
    blocks = with_journal(running, b"", options)
    whole = split(blocks)[1]
    assert added_up(whole)["texts"] == {(0, "text_delta"): "user\ngrößer 日本語 😀 the quick brown "}
    for cut in range(1, len(blocks)):
        journal, before = split(blocks[:cut])
        rest = split(with_journal(running, journal, options))[1]
        assert added_up(before + rest) == added_up(whole), f"cut after {cut} blocks"


def with_journal(running, journal: bytes, options: dict[str, Any]) -> list[bytes]:
    content = json.dumps({"messages": MESSAGES} | options).encode()
    headers = {"x-kvasir-resumable": "1"} | ({"x-kvasir-journal-at": str(len(content))} if journal else {})
    response = running.http.post("/v1/messages", content=content + journal, headers=headers)
    assert (response.status_code, response.headers["x-kvasir-resumable"]) == (200, "1"), response.text
    return response.content.split(b"\n\n")[:-1]


def split(blocks: list[bytes]) -> tuple[bytes, list[dict[str, Any]]]:
    lines, events = b"", b""
    for block in blocks:
        if block.startswith(COMMENT):
            line, _, block = block.partition(b"\n")
            lines += line.removeprefix(COMMENT) + b"\n"
        events += block + b"\n\n" if block else b""
    return lines, events_of(events)


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """How much text comes with one event depends on the moment."""
    texts: dict[tuple[int, str], str] = {}
    others = []
    for event in events:
        if event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            texts[event["index"], kind] = texts.get((event["index"], kind), "") + piece
        else:
            others.append(event)
    return {"texts": texts, "others": others}


def test_tokens_are_counted_as_they_would_be_prefilled(running, client) -> None:
    count = client.messages.count_tokens(model="tiny", system="Be brief.", messages=MESSAGES)
    message = client.messages.create(model="tiny", system="Be brief.", messages=MESSAGES, max_tokens=1)
    assert count.input_tokens == message.usage.input_tokens


def test_the_header_of_coding_assistants_is_dropped_where_that_is_wanted(start_server) -> None:
    with start_server(config=ServerConfig(drop_client_header=True)) as running:
        response = ask(running, system=[HEADER, text("Be brief.")], max_tokens=1)
        assert response.status_code == 200
        assert prompt_text(running).startswith("<|im_start|>system\nBe brief.<|im_end|>")
        counted = ask(running, "/v1/messages/count_tokens", system=[HEADER, text("Be brief.")])
        assert counted.json()["input_tokens"] == len(running.core.received[0].spec.prompt_token_ids)


def test_the_header_of_coding_assistants_stays_unless_that_is_wanted(running) -> None:
    ask(running, system=[HEADER, text("Be brief.")], max_tokens=1)
    assert HEADER["text"] in prompt_text(running)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"messages": []}, "messages: [] was given"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: it is no message with one of the roles"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: a message of the role 'user' needs"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: a text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: a block of the"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: a text is"),
        ({"system": [{"type": "image"}]}, "system[0]: a block of the type 'image' cannot stand here"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers: this server does not support it"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_place(running, path: str, options: Any, told: str) -> None:
    response = ask(running, path, **options)
    assert (response.status_code, response.json()["type"]) == (400, "error")
    error = response.json()["error"]
    assert (error["type"], told in error["message"]) == ("invalid_request_error", True), error


@pytest.mark.parametrize(
    ("options", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error"),
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "invalid_request_error"),
    ],
)
def test_errors_are_in_the_words_of_this_api(running, options: Any, status: int, kind: str) -> None:
    response = ask(running, **options)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


NOT_HELD = {"type": "object", "properties": {"a": {"pattern": "(?=b)"}}}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tools": [{"name": "n" * 300, "input_schema": {}}]}, "tools[0].name: "),
        (
            {"tools": [{"name": "w", "strict": True, "input_schema": NOT_HELD}]},
            "tools: the tool 'w': 'pattern' at /pro",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": NOT_HELD}}}, "output_config.format.schema: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
    ],
)
def test_fields_have_the_names_of_this_api(model, options: dict[str, Any], told: str) -> None:
    response = model.http.post("/v1/messages", json=asked("Hi") | options)
    assert (response.status_code, response.json()["error"]["message"].startswith(told)) == (400, True), response.text


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [("GET", "/v1/messages", 405, "invalid_request_error"), ("POST", "/v1/messages/batches", 404, "not_found_error")],
)
def test_what_is_no_route_is_told_in_the_words_of_this_api(
    running, method: str, path: str, status: int, kind: str
) -> None:
    response = running.http.request(method, path)
    assert (response.status_code, response.json()["type"], response.json()["error"]["type"]) == (status, "error", kind)


def test_fields_of_newer_clients_are_taken(client) -> None:
    message = client.messages.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=1,
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"context_management": {"edits": []}, "diagnostics": True},
    )
    assert message.usage.output_tokens == 1


def test_no_more_fields_are_named_in_the_log_than_anybody_reads(running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvasir_runtime"):
        for start in range(0, 3000, 500):
            ask(running, max_tokens=1, **{f"new_{number}": 1 for number in range(start, start + 500)})
    named = [record.message for record in caplog.records if "mean nothing here" in record.message]
    assert 0 < len(named) < 6


def test_a_format_of_the_answer_becomes_its_grammar(running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ask(running, output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = running.core.received[0].spec.grammar
    ask(running, output_format={"type": "json_schema", "schema": schema})
    assert grammar is not None
    assert running.core.received[1].spec.grammar == grammar


@pytest.mark.parametrize("headers", [{"x-api-key": "secret"}, {"authorization": "Bearer secret"}])
def test_a_key_may_be_sent_as_either_api_has_it(start_server, headers: dict[str, str]) -> None:
    with start_server(config=ServerConfig(api_key="secret")) as running:
        assert ask(running, headers=headers).status_code == 200
        refused = ask(running, headers={"x-api-key": "other"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_a_stream_that_goes_wrong_ends_with_an_error_event(start_server) -> None:
    with start_server() as running:
        running.core.step_seconds = 0.01
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "stream": True, "ignore_eos": True}
        received = b""
        with running.http.stream("POST", "/v1/messages", json=body) as response:
            for chunk in response.iter_bytes():
                if not received:
                    running.core.die()
                received += chunk
    last = events_of(received)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
