"""Instructor, in its modes."""

import instructor
from features import BASE_URL, CALLER, KEY, QUESTION, WRITER, Capital, report
from openai import AsyncOpenAI, OpenAI

CLIENT = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
ASKED = {"messages": [{"role": "user", "content": QUESTION}], "response_model": Capital, "temperature": 0}


def ask(mode: instructor.Mode, model: str) -> None:
    client = instructor.from_openai(CLIENT, mode=mode)
    assert isinstance(client.chat.completions.create(model=model, max_retries=0, **ASKED), Capital)


def tools() -> None:
    ask(instructor.Mode.TOOLS, CALLER)


def strict_tools() -> None:
    ask(instructor.Mode.TOOLS_STRICT, CALLER)


def json_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA, WRITER)


def partial() -> None:
    client = instructor.from_openai(CLIENT, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(model=WRITER, **ASKED)
    assert last.city in ("Paris", "Rome")


async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        assert isinstance(await patched.chat.completions.create(model=WRITER, max_retries=0, **ASKED), Capital)


if __name__ == "__main__":
    report(tools, strict_tools, json_schema, partial, asynchronous)
