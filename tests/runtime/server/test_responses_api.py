"""POST /v1/responses and what is kept of responses, asked through the official client."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.runtime.server.conftest import Running
from tests.runtime.server.test_tools import CITY, TEXTS, TIME, WEATHER, own_model
from tests.runtime.talk.test_grammar import Model

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.server.journal import COMMENT
from kvasir_runtime.server.open_responses_request import ResponsesRequest

__all__ = ["own_model"]  # a fixture
PROMPT = "größer 日本語 😀 the quick brown fox"
PARAMETERS = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "...", "parameters": PARAMETERS, "strict": False}
    for name in ("weather", "time")
]


@pytest.fixture
def model(own_model: Running) -> Running:
    """It writes the last message's content."""
    own_model.core.received, own_model.core.aborted = [], []
    return own_model


def create(running: Running, given: Any = PROMPT, **options: Any) -> Response:
    return running.client.responses.create(input=given, **options)


def prompt_text(running: Running) -> str:
    return running.tokenizer.decode(running.core.received[-1].spec.prompt_token_ids, skip_special_tokens=False)


def test_a_response_has_its_text_its_usage_and_what_was_asked(running) -> None:
    running.core.num_cached_tokens = 3
    response = create(running, model="tiny", max_output_tokens=5, metadata={"a": "b"}, temperature=0.5)
    [item] = response.output
    assert (response.object, response.model, response.id[:5]) == ("response", "tiny", "resp_")
    assert (item.type, item.role, response.output_text[:5]) == ("message", "assistant", "user\n")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (item.status, response.metadata, response.temperature) == ("incomplete", {"a": "b"}, 0.5)
    usage = response.usage
    assert usage.input_tokens == len(running.core.received[0].spec.prompt_token_ids)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (3, 5)
    assert usage.total_tokens == usage.input_tokens + 5


def test_items_become_the_prompt_that_chat_makes(running) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "there"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"role": "user", "content": "You?"},
    ]
    create(running, items, instructions="Be brief.", max_output_tokens=1)
    assert prompt_text(running) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nYou?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_each_message_of_the_assistant_stays_in_the_prompt(running) -> None:
    said = [{"type": "message", "role": "assistant", "content": text} for text in ("I look.", "It is sunny.")]
    create(running, [{"role": "user", "content": "Hi"}, *said], max_output_tokens=1)
    assert "\nI look.<|im_end|>\n<|im_start|>assistant\nIt is sunny.<|im_end|>" in prompt_text(running)


TYPED = TypeAdapter(ResponseStreamEvent)
OPENED = ["response.created", "response.in_progress"]
BEGUN = ["response.output_item.added", "response.content_part.added"]
ENDED = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def test_events_are_typed_and_numbered_in_their_order(running) -> None:
    events = events_of(ask(running, stream=True, max_output_tokens=6).content)
    for number, event in enumerate(events):
        TYPED.validate_python(event)
        assert event["sequence_number"] == number
    kinds = [event["type"] for event in events]
    assert kinds[:4] == OPENED + BEGUN
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [*ENDED, "response.incomplete"]


def ask(running: Running, headers: dict[str, str] | None = None, **options: Any) -> Any:
    return running.http.post("/v1/responses", json={"input": PROMPT} | options, headers=headers)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Each names its kind twice; the last block is a comment."""
    events = []
    for block in stream.replace(b"\n\r\n", b"\n\n").split(b"\n\n")[:-1]:
        if block == b": end":
            continue
        kind, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert kind == b"event: " + event["type"].encode()
        events.append(event)
    return events


@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_adds_up_to_the_whole(model, name: str) -> None:
    options: dict[str, Any] = {"model": "talking", "input": TEXTS[name], "tools": TOOLS, "store": False}
    whole = model.client.responses.create(**options)
    with model.client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    assert contents(streamed.to_dict()) == contents(whole.to_dict())
    events = events_of(ask(model, **options, stream=True).content)
    for event in events:
        TYPED.validate_python(event)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def contents(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from response to response."""
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    for item in output:
        for part in item.get("content", ()):
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return {"output": output, "status": response["status"], "usage": response["usage"]}


def items_of(response: Response) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for item in response.output:
        match item.type:
            case "function_call":
                items.append((item.name, item.arguments))
            case "reasoning" | "message":
                items.append((item.type, item.content[0].text))
            case kind:
                items.append((kind, item.input))
    return items


@pytest.mark.parametrize(
    ("written", "items"),
    [
        ("Hello.", [("message", "Hello.")]),
        ("", []),
        (f"I look.\n{WEATHER}\n{TIME}", [("message", "I look."), ("weather", CITY), ("time", "{}")]),
        ("<think>\nWhat now?\n</think>\n\nHello.", [("reasoning", "What now?"), ("message", "Hello.")]),
    ],
)
def test_thoughts_text_and_calls_are_items(model, written: str, items: list[Any]) -> None:
    response = create(model, written, tools=TOOLS)
    assert (items_of(response), response.status) == (items, "completed")


def test_thoughts_are_counted_apart(model) -> None:
    usage = create(model, "<think>\nWhat now?\n</think>\n\nHello.").usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_call_that_is_cut_is_incomplete(model) -> None:
    response = create(model, WEATHER, tools=TOOLS, max_output_tokens=55)
    [item] = response.output
    assert (response.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")
    assert CITY.startswith(item.arguments.rstrip("\N{REPLACEMENT CHARACTER}"))


LARK = 'start: "*** " /[^\\n]+/ "\\n"'
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
SPACE = {"type": "namespace", "name": "files", "description": "...", "tools": [{**TOOLS[0], "name": "read"}, PATCH]}


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_custom_tool_is_called_with_a_text(model) -> None:
    options: dict[str, Any] = {"tools": [PATCH], "input": called("patch", input='*** "a"\n')}
    response = create(model, options["input"], tools=options["tools"])
    assert items_of(response) == [("custom_tool_call", '*** "a"\n')]
    events = events_of(ask(model, **options, stream=True).content)
    for event in events:
        TYPED.validate_python(event)
    texts = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(texts) == '*** "a"\n'
    assert [event["type"] for event in events][-2:] == ["response.output_item.done", "response.completed"]


def test_a_tool_of_a_namespace_is_called_by_both_names(model) -> None:
    [item] = create(model, called("files__read", path="a"), tools=[SPACE]).output
    assert (item.type, item.namespace, item.name) == ("function_call", "files", "read")
    [item] = create(model, called("files__patch", input="x"), tools=[SPACE]).output
    assert (item.type, item.namespace, item.name, item.input) == ("custom_tool_call", "files", "patch", "x")


@pytest.mark.parametrize("given", [{}, {"tool_choice": "required"}])
@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"),
    [("lark", LARK, '*** "a"\n', "a"), ("regex", '[^"]+"', 'x\t"', "x")],
)
def test_a_custom_tools_input_is_held_to_its_grammar(model, given, syntax, definition, good, bad) -> None:
    format_ = {"type": "grammar", "syntax": syntax, "definition": definition}
    create(model, "Hi", tools=[TOOLS[0], PATCH | {"format": format_}], **given)
    vocabulary = Model([f"<{number}>" for number in range(80)], "hermes")  # of bytes, and ids as high as the model has
    for text, is_taken in ((good, True), (bad, False)):
        written = called("patch", input=text)
        num_taken = vocabulary.num_chars_taken(model.core.received[-1].spec.grammar, written)
        assert (num_taken == len(written)) is is_taken


@pytest.mark.parametrize(
    ("format_", "told"),
    [
        ({"syntax": "lark", "definition": "start: X"}, "tools[0].format.definition"),
        ({"syntax": "regex", "definition": "(a"}, "tools[0].format.definition"),
        ({"syntax": "bnf", "definition": "a"}, "tools[0].format.syntax: 'bnf' was given; known are lark and regex"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_its_place(model, format_: Any, told: str) -> None:
    response = ask(model, tools=[PATCH | {"format": {"type": "grammar", **format_}}])
    assert (response.status_code, told in response.json()["error"]["message"]) == (400, True), response.text


def test_tools_that_run_at_openai_are_left_out(model) -> None:
    response = create(model, WEATHER, tools=[{"type": "web_search"}])
    assert items_of(response) == [("message", WEATHER)]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "web_search"}, "a choice of the type 'web_search' cannot be made here"),
        ({"type": "function", "name": "nobody"}, "tool_choice names 'nobody', which is none of the tools"),
        ({"type": "function"}, "tool_choice.name: a text is expected"),
    ],
)
def test_a_wrong_choice_of_tools_is_refused(model, choice: Any, told: str) -> None:
    response = ask(model, tools=TOOLS, tool_choice=choice)
    assert (response.status_code, told in response.json()["error"]["message"]) == (400, True), response.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_is_asked_for_is_forced(model, choice: Any) -> None:
    assert items_of(create(model, WEATHER, tools=TOOLS, tool_choice=choice)) == [("weather", CITY)]
    assert model.core.received[0].spec.grammar is not None


def test_effort_reaches_the_template(model) -> None:
    create(model, "Hello.", reasoning={"effort": "none"})
    assert prompt_text(model).startswith("<think></think>")


def test_a_format_of_the_answer_becomes_its_grammar(running) -> None:
    class City(BaseModel):
        name: str

    schema = City.model_json_schema()
    ask(running, text={"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}})
    assert running.core.received[-1].spec.grammar is not None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "name": "n" * 300}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/a"}}}}, "text.format.schema"),
        ({"input": "x " * 9000}, "input"),
    ],
)
def test_fields_have_the_names_of_this_api(model, options: dict[str, Any], param: str) -> None:
    response = model.http.post("/v1/responses", json={"input": "Hi"} | options)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_response_goes_on_from_another(model) -> None:
    tool_call = create(model, WEATHER, tools=TOOLS)
    [call] = tool_call.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = create(model, [output], previous_response_id=tool_call.id, tools=TOOLS)
    assert (second.output_text, second.previous_response_id) == ("sunny", tool_call.id)
    third = create(model, "And now?", previous_response_id=second.id)
    listed = model.client.responses.input_items.list(third.id, order="asc").data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output", "message", "message"]


def test_a_conversation_is_prefilled_as_if_it_had_been_sent(running) -> None:
    first = create(running, "Hi", instructions="Be brief.", max_output_tokens=2)
    create(running, "Go on", previous_response_id=first.id, max_output_tokens=1)
    assert prompt_text(running) == (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{first.output_text}<|im_end|>\n"
        "<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_items_may_be_named(model) -> None:
    first = create(model, "Hello.")
    create(model, [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Hi"}])
    refused = ask(model, input=[{"type": "item_reference", "id": "msg_0"}])
    assert (refused.status_code, "'msg_0' is not kept here" in refused.text) == (400, True)


def test_what_is_kept_can_be_got_and_deleted(running) -> None:
    made = create(running, max_output_tokens=2)
    responses = running.client.responses
    assert responses.retrieve(made.id).to_dict() == made.to_dict()
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        responses.cancel(made.id)
    responses.delete(made.id)
    for again in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            again(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        create(running, previous_response_id=made.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_kept_is_not(running) -> None:
    made = create(running, max_output_tokens=2, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        running.client.responses.retrieve(made.id)


@pytest.mark.parametrize(("is_prefill", "is_kept"), [(True, False), (False, True)])
def test_a_prefill_for_another_engine_is_kept_there(is_prefill: bool, is_kept: bool) -> None:
    body = {"input": "hi", "kv_transfer_params": {"do_remote_decode": is_prefill}}
    assert ResponsesRequest.model_validate(body).is_kept is is_kept


def test_a_streamed_response_is_kept_too(running) -> None:
    events = events_of(ask(running, stream=True, max_output_tokens=3).content)
    last = events[-1]["response"]
    assert running.http.get(f"/v1/responses/{last['id']}").json() == last


def test_a_tenant_sees_its_own_responses_alone(running) -> None:
    made = ask(running, {"x-kvasir-tenant": "blue"}, max_output_tokens=2).json()
    path = f"/v1/responses/{made['id']}"
    assert running.http.get(path, headers={"x-kvasir-tenant": "blue"}).status_code == 200
    assert running.http.get(path, headers={"x-kvasir-tenant": "red"}).status_code == 404
    assert running.http.delete(path).status_code == 404


def test_the_oldest_make_room(start_server) -> None:
    with start_server(config=ServerConfig(response_store_bytes=4000)) as running:
        made = [create(running, max_output_tokens=2).id for _ in range(6)]
        kept = [running.http.get(f"/v1/responses/{each}").status_code == 200 for each in made]
        refused = ask(running, background=True, metadata={"of": "x" * 4000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert kept == sorted(kept)
    assert 0 < sum(kept) < 6


def test_input_items_come_in_pages(running) -> None:
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    made = create(running, items, max_output_tokens=1)
    page = running.client.responses.input_items.list(made.id, limit=2)
    texts = [[item.content[0].text for item in each.data] for each in page.iter_pages()]
    assert texts == [["4", "3"], ["2", "1"], ["0"]]


@pytest.mark.parametrize(
    ("role", "kind"), [("developer", "input_text"), ("user", "input_text"), ("assistant", "output_text")]
)
def test_an_input_items_text_is_a_part(running, role: str, kind: str) -> None:
    made = create(running, [{"role": role, "content": "a"}, {"role": "user", "content": "b"}], max_output_tokens=1)
    item = running.client.responses.input_items.list(made.id, order="asc").data[0]
    assert (item.role, item.content[0].type, item.content[0].text) == (role, kind, "a")


@pytest.mark.parametrize("query", ["limit=x", f"limit={'9' * 5000}", "order=up", "after=nobody"])
def test_a_wrong_page_is_refused(running, query: str) -> None:
    made = create(running, max_output_tokens=1)
    refused = running.http.get(f"/v1/responses/{made.id}/input_items?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"input": []}, "input: [] was given"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]: an item of the type 'web_search_call' cannot be part"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0]: it is no message with one of the roles"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: a part of the type",
        ),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id: a text is expected"),
        ({"background": True, "store": False}, "store: a response in the background is kept"),
        ({"conversation": "conv_1"}, "conversation: this server does not support it"),
        ({"top_logprobs": 3}, "top_logprobs, message.output_text.logprobs: this server does not support it"),
        ({"max_output_tokens": 0}, "max_output_tokens: 0 was given"),
        ({"max_output_tokens": 5000}, "max_output_tokens is 5000"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format: type json_schema needs name and schema"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: 'resp_1' is not kept here"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_place(running, options: Any, told: str) -> None:
    response = ask(running, **options)
    assert (response.status_code, told in response.json()["error"]["message"]) == (400, True), response.text


def test_fields_of_newer_clients_are_taken(running) -> None:
    options = {"client_metadata": {"a": "b"}, "prompt_cache_key": "k", "include": ["reasoning.encrypted_content"]}
    assert ask(running, **options, max_output_tokens=1).status_code == 200


@pytest.mark.parametrize("name", ["calls behind text", "thought and calls", "broken", "plain"])
def test_a_stream_cut_anywhere_and_continued_adds_up_to_the_whole(model, name: str) -> None:
    options = {"input": TEXTS[name], "tools": TOOLS, "stream": True, "seed": 1}
    blocks = with_journal(model, b"", options)
    whole = split(blocks)[1]
    for cut in range(1, len(blocks)):
        journal, before = split(blocks[:cut])
        events = before + split(with_journal(model, journal, options))[1]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert added_up(events) == added_up(whole), f"cut after {cut} blocks"


def with_journal(running: Running, journal: bytes, options: dict[str, Any]) -> list[bytes]:
    content = json.dumps(options).encode()
    headers = {"x-kvasir-resumable": "1"} | ({"x-kvasir-journal-at": str(len(content))} if journal else {})
    response = running.http.post("/v1/responses", content=content + journal, headers=headers)
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
    texts: dict[str, str] = {}
    others = []
    for event in events:
        event.pop("sequence_number", None)
        if isinstance(response := event.get("response"), dict):
            response["completed_at"] = response["created_at"] = None
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        else:
            others.append(event)
    created = others[0]["response"]["id"]
    return json.loads(json.dumps({"texts": texts, "others": others}).replace(created, "ID"))


def test_a_stream_that_goes_wrong_ends_with_a_failed_response(start_server) -> None:
    with start_server() as running:
        running.core.step_seconds = 0.01
        received = b""
        body = {"input": PROMPT, "stream": True, "max_output_tokens": 400, "ignore_eos": True}
        with running.http.stream("POST", "/v1/responses", json=body) as response:
            for chunk in response.iter_bytes():
                if not received:
                    running.core.die()
                received += chunk
    last = events_of(received)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    TYPED.validate_python(last)


def ended(running: Running, response: Response) -> Response:
    """What becomes of one in the background."""
    running.wait_idle()
    return running.client.responses.retrieve(response.id)


def test_a_response_in_the_background_is_made_while_nobody_waits(running) -> None:
    running.core.is_hanging = True
    begun = create(running, background=True, max_output_tokens=5)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    running.core.wait_until(lambda core: core.received)
    assert running.client.responses.retrieve(begun.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="is not there yet"):
        create(running, "and?", previous_response_id=begun.id)
    running.core.is_hanging = False
    made = ended(running, begun)
    assert (made.status, made.background, made.usage.output_tokens) == ("incomplete", True, 5)
    assert made.output_text.startswith("user")
    assert create(running, "and?", previous_response_id=begun.id, max_output_tokens=1).status == "incomplete"


def test_a_response_in_the_background_can_be_cancelled(running) -> None:
    running.core.step_seconds = 0.02
    begun = create(running, background=True, extra_body={"ignore_eos": True})
    running.core.wait_until(lambda core: core.received)
    cancelled = running.client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.id) == ("cancelled", begun.id)
    running.core.wait_until(lambda core: core.aborted)
    assert ended(running, begun).status == running.client.responses.cancel(begun.id).status == "cancelled"


def test_a_stream_in_the_background_is_left_and_come_back_to(running) -> None:
    running.core.step_seconds = 0.02
    options: Any = {"max_output_tokens": 30, "extra_body": {"ignore_eos": True}}
    with create(running, background=True, stream=True, **options) as stream:
        left = [next(stream) for _ in range(4)]
    response_id = left[0].response.id
    assert running.client.responses.retrieve(response_id).status == "in_progress"
    retrieve = running.client.responses.retrieve
    rest = [*retrieve(response_id, stream=True, starting_after=left[-1].sequence_number)]
    events = [*left, *rest]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    made = ended(running, events[-1].response)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == made.output_text
    assert (made.to_dict(), made.usage.output_tokens) == (events[-1].response.to_dict(), 30)
    assert [*retrieve(response_id, stream=True)] == events
    assert [*retrieve(response_id, stream=True, starting_after=len(events) - 2)] == events[-1:]
    assert [*retrieve(response_id, stream=True, starting_after=10**17)] == []


def test_a_stream_in_the_background_begins_at_any_of_the_events_of_one_token(model) -> None:
    [*events] = create(model, "Hello.", background=True, stream=True)
    retrieve = model.client.responses.retrieve
    for number in range(len(events)):
        again = retrieve(events[0].response.id, stream=True, starting_after=number)
        assert [*again] == events[number + 1 :]


@pytest.mark.parametrize("ends", ["cancel", "delete"])
def test_a_stream_in_the_background_ends_with_its_response(running, ends: str) -> None:
    running.core.step_seconds = 0.02
    with create(running, background=True, stream=True, extra_body={"ignore_eos": True}) as stream:
        response_id = next(stream).response.id
        getattr(running.client.responses, ends)(response_id)
        running.core.wait_until(lambda core: core.aborted)
        [*_, last] = stream
    running.wait_idle()
    if ends == "cancel":
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert running.client.responses.retrieve(response_id).status == "cancelled"
    else:
        with pytest.raises(openai.NotFoundError):
            running.client.responses.retrieve(response_id)


def test_a_stream_in_the_background_that_fails_says_so(running) -> None:
    running.core.error = "the device is on fire"
    [*_, last] = create(running, background=True, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "the device is on fire")
    assert ended(running, last.response).status == "failed"


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("stream=true", "was not made with background and stream"),
        ("stream=yes", "stream: 'yes' was given, which is none of its values"),
        ("starting_after=3", "starting_after: it is of streams; add stream=true"),
        ("stream=true&starting_after=-1", "starting_after: '-1' was given"),
        ("stream=true&starting_after=1e3", "starting_after: '1e3' was given"),
        (f"stream=true&starting_after={10**30}", "starting_after: '1000"),
    ],
)
def test_events_that_are_not_kept_are_refused(running, query: str, told: str) -> None:
    made = create(running, background=True, max_output_tokens=2)
    answer = running.http.get(f"/v1/responses/{made.id}?{query}")
    assert (answer.status_code, told in answer.text) == (400, True)


def test_a_response_in_the_background_that_fails_says_so(running) -> None:
    running.core.error = "the device is on fire"
    failed = ended(running, create(running, background=True))
    assert (failed.status, failed.error.message) == ("failed", "the device is on fire")
