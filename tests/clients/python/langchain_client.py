"""LangChain through langchain-openai: chat models, agents and embeddings."""

from features import ANSWER, BASE_URL, CALLER, EMBEDDER, KEY, QUESTION, VECTOR_SIZE, WRITER, Capital, report, weather
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


def chat_model(name: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=BASE_URL, api_key=KEY, temperature=0, max_retries=0, **options)


def chat() -> None:
    answer = chat_model(WRITER, max_tokens=8).invoke(QUESTION)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    assert "".join(chunk.text for chunk in chat_model(WRITER, max_tokens=8).stream(QUESTION))


def completions() -> None:
    assert OpenAI(model=WRITER, base_url=BASE_URL, api_key=KEY, max_tokens=8).invoke("import os\n")


def tools() -> None:
    [call] = chat_model(CALLER).bind_tools([weather]).invoke(QUESTION).tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})


def agent() -> None:
    agent = create_agent(chat_model(CALLER), [weather])
    assert agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text.startswith(ANSWER)


def structured() -> None:
    for name, method in ((WRITER, "json_schema"), (CALLER, "function_calling")):
        model = chat_model(name).with_structured_output(Capital, method=method)
        assert isinstance(model.invoke(QUESTION), Capital), method


def responses() -> None:
    assert chat_model(WRITER, max_tokens=16, use_responses_api=True).invoke(QUESTION).text
    agent = create_agent(chat_model(CALLER, use_responses_api=True), [weather])
    assert agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text.startswith(ANSWER)


def embeddings() -> None:
    model = OpenAIEmbeddings(model=EMBEDDER, base_url=BASE_URL, api_key=KEY, check_embedding_ctx_length=False)
    assert [len(vector) for vector in model.embed_documents(["import os", "def f(): pass"])] == [VECTOR_SIZE] * 2


async def asynchronous() -> None:
    answers = await chat_model(WRITER, max_tokens=8).abatch([QUESTION] * 4)
    assert all(answer.text for answer in answers)


if __name__ == "__main__":
    report(chat, stream, completions, tools, agent, structured, responses, embeddings, asynchronous)
