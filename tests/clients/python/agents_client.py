"""OpenAI's Agents SDK, over Responses (its default) and over chat completions."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import ANSWER, BASE_URL, CALLER, KEY, QUESTION, WRITER, Capital, report, weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
MODELS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
GREEDY = ModelSettings(temperature=0)


async def chat() -> None:
    for kind in MODELS:
        agent = Agent(name="caller", model=kind(CALLER, CLIENT), model_settings=GREEDY)
        assert (await Runner.run(agent, "Hello")).final_output == "Hello!"


async def tools() -> None:
    for kind in MODELS:
        agent = Agent(name="caller", model=kind(CALLER, CLIENT), tools=[function_tool(weather)], model_settings=GREEDY)
        assert (await Runner.run(agent, QUESTION)).final_output.startswith(ANSWER)


async def streamed_tools() -> None:
    for kind in MODELS:
        agent = Agent(name="caller", model=kind(CALLER, CLIENT), tools=[function_tool(weather)], model_settings=GREEDY)
        run = Runner.run_streamed(agent, QUESTION)
        events = [event.type async for event in run.stream_events()]
        assert "run_item_stream_event" in events
        assert run.final_output.startswith(ANSWER)


async def structured() -> None:
    for kind in MODELS:
        agent = Agent(name="writer", model=kind(WRITER, CLIENT), output_type=Capital, model_settings=GREEDY)
        assert isinstance((await Runner.run(agent, QUESTION)).final_output, Capital)


if __name__ == "__main__":
    report(chat, tools, streamed_tools, structured)
