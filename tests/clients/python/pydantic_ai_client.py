"""Pydantic AI: agents over chat completions, Responses and Anthropic's protocol."""

from features import ANSWER, BASE_URL, CALLER, KEY, QUESTION, URL, WRITER, Capital, report, weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
GREEDY = {"temperature": 0}


def model(name: str) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=PROVIDER)


async def chat() -> None:
    assert (await Agent(model(WRITER)).run(QUESTION, model_settings={"max_tokens": 8} | GREEDY)).output


async def stream() -> None:
    async with Agent(model(WRITER)).run_stream(QUESTION, model_settings={"max_tokens": 8} | GREEDY) as answer:
        assert [text async for text in answer.stream_text(delta=True)]


async def tools() -> None:
    answer = await Agent(model(CALLER), tools=[weather]).run(QUESTION, model_settings=GREEDY)
    assert answer.output.startswith(ANSWER)


async def streamed_tools() -> None:
    async with Agent(model(CALLER), tools=[weather]).run_stream(QUESTION, model_settings=GREEDY) as answer:
        assert (await answer.get_output()).startswith(ANSWER)


async def tool_output() -> None:
    agent = Agent(model(CALLER), output_type=ToolOutput(Capital))
    assert isinstance((await agent.run(QUESTION, model_settings=GREEDY)).output, Capital)


async def native_output() -> None:
    agent = Agent(model(WRITER), output_type=NativeOutput(Capital))
    assert isinstance((await agent.run(QUESTION, model_settings=GREEDY)).output, Capital)


async def responses() -> None:
    agent = Agent(OpenAIResponsesModel(CALLER, provider=PROVIDER), tools=[weather])
    assert (await agent.run(QUESTION, model_settings=GREEDY)).output.startswith(ANSWER)


async def messages() -> None:
    agent = Agent(AnthropicModel(CALLER, provider=AnthropicProvider(base_url=URL, api_key=KEY)), tools=[weather])
    assert (await agent.run(QUESTION, model_settings=GREEDY)).output.startswith(ANSWER)


if __name__ == "__main__":
    report(chat, stream, tools, streamed_tools, tool_output, native_output, responses, messages)
