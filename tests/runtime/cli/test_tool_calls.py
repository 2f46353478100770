"""A model that was trained to call tools, asked through OpenAI's client as an agent does it."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.docs.commands import Command, documented
from tests.runtime.cli.conftest import Server, running_servers

MODEL = Path(__file__).parents[3] / "examples/models/kvasir-caller"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
PARIS = [("weather", {"city": "Paris"})]
BOTH = [("time", {"city": "Oslo"}), ("time", {"city": "Rome"})]
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_servers(MODEL) as start:
        lookup = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
        yield start("--dtype", "float32", "--speculative-config", lookup).wait_ready()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    asked = {"model": "kvasir-caller", "temperature": 0, "max_tokens": 200, "tools": TOOLS} | options
    return client.chat.completions.create(messages=messages, **asked).choices[0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    calls = choice.message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("command", documented("curl http://127.0.0.1:8000/"), ids=str)
def test_the_documented_question_is_answered_with_a_call(server: Server, command: Command) -> None:
    typed = shlex.split(command.text.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run([*typed, "--silent"], capture_output=True, text=True, timeout=60, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Paris"}']


def test_an_agent_asks_calls_and_gets_its_answer(client: openai.OpenAI) -> None:
    choice = ask(client, QUESTION)
    assert (choice.finish_reason, choice.message.content, calls_of(choice)) == ("tool_calls", None, PARIS)
    assert choice.message.reasoning == choice.message.reasoning_content == "The weather in Paris."
    [call] = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    final = ask(client, QUESTION, choice.message.to_dict(), result)
    assert (final.finish_reason, final.message.content) == ("stop", "The weather in Paris is 12.")


@pytest.mark.parametrize("more", [{}, {"extra_body": NO_THOUGHT}], ids=["thinking", "not"])
@pytest.mark.parametrize(
    ("question", "calls"),
    [("What is the weather in Paris?", PARIS), ("What is the time in Oslo and Rome?", BOTH), ("Hello", [])],
)
def test_a_stream_brings_what_the_whole_does(client: openai.OpenAI, question: str, calls: Any, more: Any) -> None:
    whole = ask(client, {"role": "user", "content": question}, **more)
    asked = {"model": "kvasir-caller", "temperature": 0, "max_tokens": 200, "tools": TOOLS} | more
    with client.chat.completions.stream(messages=[{"role": "user", "content": question}], **asked) as events:
        for _ in events:
            pass
        [streamed] = events.get_final_completion().choices
    assert calls_of(whole) == calls_of(streamed) == calls
    assert (whole.message.content or "") == (streamed.message.content or "") == ("" if calls else "Hello!")
    assert whole.finish_reason == streamed.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("tools", [None, TOOLS[1:]], ids=["no tools", "other tools"])
def test_what_cannot_be_called_is_not(client: openai.OpenAI, tools: Any) -> None:
    choice = ask(client, QUESTION, tools=tools, extra_body=NO_THOUGHT)
    assert (choice.message.content, calls_of(choice)) == ("I cannot look that up.", [])


def test_a_call_can_be_forced(client: openai.OpenAI) -> None:
    """It would greet."""
    hello = {"role": "user", "content": "Hello"}
    named = {"type": "function", "function": {"name": "time"}}
    for choice in ("required", named):
        forced = ask(client, hello, tool_choice=choice)
        [(name, arguments)] = calls_of(forced)[:1]
        assert list(arguments) == ["city"]
        assert name == "time" or choice == "required"
        assert forced.message.reasoning == "A greeting."


def test_a_thought_ends_where_its_budget_does(client: openai.OpenAI) -> None:
    choice = ask(client, QUESTION, extra_body={"thinking_token_budget": 4})
    assert choice.message.reasoning in ("The weather", "The weather in")
    assert choice.finish_reason in ("tool_calls", "stop")


def test_a_structured_answer_comes_behind_the_thought(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema | {"additionalProperties": False}}}
    choice = ask(client, QUESTION, tool_choice="none", response_format=form)
    assert choice.message.reasoning == "The weather in Paris."
    assert json.loads(choice.message.content) == {"city": "Rome"}
