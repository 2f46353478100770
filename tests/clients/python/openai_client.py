"""OpenAI's own client."""

import asyncio
import json

import httpx
from features import (
    ANSWER,
    BASE_URL,
    CALLER,
    CITY_SCHEMA,
    EMBEDDER,
    KEY,
    MODELS,
    QUESTION,
    VECTOR_SIZE,
    WRITER,
    Capital,
    refusal,
    report,
)
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

CLIENT = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
ASKED = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY_SCHEMA}}


def chat() -> None:
    answer = CLIENT.chat.completions.create(model=WRITER, messages=ASKED, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def stream() -> None:
    chunks = list(
        CLIENT.chat.completions.create(
            model=WRITER,
            messages=ASKED,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


def completions() -> None:
    answer = CLIENT.completions.create(model=WRITER, prompt=["import", "def"], max_tokens=4, echo=True, logprobs=1)
    assert [choice.text.split()[0][:3] for choice in answer.choices] == ["imp", "def"]


def tools() -> None:
    choice = CLIENT.chat.completions.create(model=CALLER, messages=ASKED, tools=[TOOL], temperature=0).choices[0]
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    told = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    answer = CLIENT.chat.completions.create(
        model=CALLER, messages=[*ASKED, choice.message, told], tools=[TOOL], temperature=0
    )
    assert answer.choices[0].message.content.startswith(ANSWER)


def streamed_tools() -> None:
    with CLIENT.chat.completions.stream(model=CALLER, messages=ASKED, tools=[TOOL], temperature=0) as events:
        kinds = [event.type for event in events]
        [call] = events.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert call.function.parsed_arguments == {"city": "Paris"}


def structured() -> None:
    answer = CLIENT.chat.completions.parse(model=WRITER, messages=ASKED, response_format=Capital)
    assert isinstance(answer.choices[0].message.parsed, Capital)


def responses() -> None:
    answer = CLIENT.responses.create(model=WRITER, input=QUESTION, max_output_tokens=16, temperature=0)
    assert answer.output_text
    parsed = CLIENT.responses.parse(model=WRITER, input=QUESTION, text_format=Capital)
    assert isinstance(parsed.output_parsed, Capital)


def streamed_responses() -> None:
    with CLIENT.responses.stream(model=CALLER, input="Hello", temperature=0) as events:
        kinds = {event.type for event in events}
        assert events.get_final_response().output_text == "Hello!"
    assert {"response.created", "response.output_text.delta"} <= kinds


def tools_of_responses() -> None:
    tool = {"type": "function"} | TOOL["function"]
    first = CLIENT.responses.create(model=CALLER, input=QUESTION, tools=[tool], temperature=0)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    second = CLIENT.responses.create(
        model=CALLER, input=[told], previous_response_id=first.id, tools=[tool], temperature=0
    )
    assert second.output_text.startswith(ANSWER)


def background_responses() -> None:
    """One that its client leaves, and asks for again from where it was."""
    asked = {"model": WRITER, "input": QUESTION, "max_output_tokens": 40, "temperature": 0}
    whole = CLIENT.responses.create(**asked)
    with CLIENT.responses.create(**asked, background=True, stream=True) as events:
        seen = [next(events) for _ in range(6)]
    response_id, last = seen[0].response.id, seen[-1].sequence_number
    seen += CLIENT.responses.retrieve(response_id, stream=True, starting_after=last)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == whole.output_text
    assert seen[-1].response.output_text == CLIENT.responses.retrieve(response_id).output_text == whole.output_text
    assert [item.content[0].text for item in CLIENT.responses.input_items.list(response_id)] == [QUESTION]
    CLIENT.responses.delete(response_id)
    assert refusal(NotFoundError, CLIENT.responses.retrieve, response_id=response_id)


def embeddings() -> None:
    answer = CLIENT.embeddings.create(model=EMBEDDER, input=["import os", "def f(): pass"])
    assert [len(each.embedding) for each in answer.data] == [VECTOR_SIZE] * 2


async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        asking = [
            client.chat.completions.create(model=WRITER, messages=ASKED, max_tokens=8, temperature=0) for _ in range(8)
        ]
        answers = await asyncio.gather(*asking)
    assert all(answer.choices[0].message.content for answer in answers)


def retries() -> None:
    """What a client sends again, with its headers about it, is answered as if it came the first time."""
    seen: list[str] = []

    class FailsOnce(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            seen.append(request.headers["x-stainless-retry-count"])
            if len(seen) == 1:
                raise httpx.ConnectError("not yet")
            return super().handle_request(request)

    with httpx.Client(transport=FailsOnce()) as transport:
        client = OpenAI(base_url=BASE_URL, api_key=KEY, http_client=transport)
        assert client.chat.completions.create(model=WRITER, messages=ASKED, max_tokens=4).choices
    assert seen == ["0", "1"]


def errors() -> None:
    good = {"model": WRITER, "messages": ASKED}
    for wrong, kind in (({"model": "nobody"}, NotFoundError), ({"max_tokens": -1}, BadRequestError)):
        assert refusal(kind, CLIENT.chat.completions.create, **good | wrong).body["message"]


def models() -> None:
    assert {model.id for model in CLIENT.models.list()} == MODELS


if __name__ == "__main__":
    report(
        chat, stream, completions, tools, streamed_tools, structured, responses, streamed_responses,
        tools_of_responses, background_responses, embeddings, asynchronous, retries, errors, models,
    )  # fmt: skip
