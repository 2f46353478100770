"""Ollama's own client."""

from features import ANSWER, CALLER, CITY_SCHEMA, MODELS, QUESTION, URL, WRITER, Capital, refusal, report
from ollama import Client, ResponseError

CLIENT = Client(host=URL)
ASKED = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY_SCHEMA}}
FEW = {"num_predict": 8, "temperature": 0}


def chat() -> None:
    answer = CLIENT.chat(model=WRITER, messages=ASKED, options=FEW)
    assert answer.message.content
    assert answer.done_reason == "length"
    assert answer.eval_count == 8


def stream() -> None:
    *pieces, last = CLIENT.chat(model=WRITER, messages=ASKED, options=FEW, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces)
    assert last.done
    assert last.eval_duration > 0


def generate() -> None:
    assert CLIENT.generate(model=WRITER, prompt=QUESTION, options=FEW).response


def load() -> None:
    assert CLIENT.chat(model=WRITER, messages=[]).done_reason == "load"
    assert CLIENT.generate(model=WRITER).done_reason == "load"


def tools() -> None:
    asked = {"model": CALLER, "tools": [TOOL], "options": {"temperature": 0}}
    for message in (
        CLIENT.chat(messages=ASKED, **asked).message,
        next(piece.message for piece in CLIENT.chat(messages=ASKED, stream=True, **asked) if piece.message.tool_calls),
    ):
        [call] = message.tool_calls
        assert call.function.arguments == {"city": "Paris"}
        told = {"role": "tool", "tool_name": "weather", "content": "12"}
        answer = CLIENT.chat(messages=[*ASKED, message, told], **asked)
        assert answer.message.content.startswith(ANSWER)


def thinking() -> None:
    answer = CLIENT.chat(
        model=CALLER, messages=[{"role": "user", "content": "Hello"}], think=True, options={"temperature": 0}
    )
    assert answer.message.thinking == "A greeting."


def structured() -> None:
    answer = CLIENT.chat(model=WRITER, messages=ASKED, format=Capital.model_json_schema())
    assert Capital.model_validate_json(answer.message.content)


def errors() -> None:
    assert refusal(ResponseError, CLIENT.chat, model="nobody", messages=ASKED).status_code == 404


def models() -> None:
    assert {model.model for model in CLIENT.list().models} == MODELS
    assert "tools" in CLIENT.show(CALLER).capabilities


if __name__ == "__main__":
    report(chat, stream, generate, load, tools, thinking, structured, errors, models)
