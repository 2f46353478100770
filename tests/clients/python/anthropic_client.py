"""Anthropic's own client."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic, BadRequestError, NotFoundError
from features import ANSWER, CALLER, CITY_SCHEMA, KEY, QUESTION, URL, WRITER, refusal, report

CLIENT = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASKED = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
TOOL = {"name": "weather", "input_schema": CITY_SCHEMA}


def chat() -> None:
    answer = CLIENT.messages.create(
        model=WRITER, messages=ASKED, max_tokens=8, extra_body=GREEDY, system="You write Python."
    )
    assert answer.content[0].text
    assert answer.usage.output_tokens > 0


def stream() -> None:
    with CLIENT.messages.stream(model=WRITER, messages=ASKED, max_tokens=8, extra_body=GREEDY) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().content[0].text == text != ""


def tools() -> None:
    first = CLIENT.messages.create(model=CALLER, messages=ASKED, tools=[TOOL], max_tokens=200, extra_body=GREEDY)
    assert first.stop_reason == "tool_use"
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12"}]}
    answering = {"role": "assistant", "content": first.content}
    second = CLIENT.messages.create(
        model=CALLER, messages=[*ASKED, answering, told], tools=[TOOL], max_tokens=200, extra_body=GREEDY
    )
    assert second.content[-1].text.startswith(ANSWER)


def streamed_tools() -> None:
    with CLIENT.messages.stream(
        model=CALLER, messages=ASKED, tools=[TOOL], max_tokens=200, extra_body=GREEDY
    ) as events:
        kinds = {event.type for event in events}
        [call] = [block for block in events.get_final_message().content if block.type == "tool_use"]
    assert "input_json" in kinds
    assert call.input == {"city": "Paris"}


def thinking() -> None:
    answer = CLIENT.messages.create(
        model=CALLER, messages=ASKED, max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]


def count_tokens() -> None:
    assert CLIENT.messages.count_tokens(model=WRITER, messages=ASKED).input_tokens > 5


async def asynchronous() -> None:
    async with AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        asking = [
            client.messages.create(model=WRITER, messages=ASKED, max_tokens=8, extra_body=GREEDY) for _ in range(8)
        ]
        answers = await asyncio.gather(*asking)
    assert all(answer.content[0].text for answer in answers)


def errors() -> None:
    good = {"model": WRITER, "messages": ASKED, "max_tokens": 8}
    for wrong, kind in (({"model": "nobody"}, NotFoundError), ({"max_tokens": -1}, BadRequestError)):
        assert refusal(kind, CLIENT.messages.create, **good | wrong).body["error"]["message"]


def models() -> None:
    assert {model.id for model in CLIENT.models.list()} >= {WRITER, CALLER}


if __name__ == "__main__":
    report(chat, stream, tools, streamed_tools, thinking, count_tokens, asynchronous, errors, models)
