"""smolagents: an agent that calls tools, through its model for OpenAI's protocol."""

from features import BASE_URL, CALLER, KEY, QUESTION, WRITER, Capital, report
from smolagents import ChatMessage, OpenAIServerModel, tool

ASKED = [ChatMessage(role="user", content=QUESTION)]


def model(name: str) -> OpenAIServerModel:
    return OpenAIServerModel(name, api_base=BASE_URL, api_key=KEY, temperature=0)


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: Of which.
    """
    return "12"


def chat() -> None:
    assert model(WRITER).generate(ASKED, max_tokens=8).content


def stream() -> None:
    assert "".join(delta.content or "" for delta in model(WRITER).generate_stream(ASKED, max_tokens=8))


def tools() -> None:
    [call] = model(CALLER).generate(ASKED, tools_to_call_from=[weather]).tool_calls
    assert call.function.name == "weather"


def structured() -> None:
    form = {"name": "capital", "schema": Capital.model_json_schema(), "strict": True}
    answer = model(WRITER).generate(ASKED, response_format={"type": "json_schema", "json_schema": form})
    Capital.model_validate_json(answer.content)


if __name__ == "__main__":
    report(chat, stream, tools, structured)
