"""LlamaIndex through its openai-like packages."""

from features import ANSWER, BASE_URL, CALLER, EMBEDDER, KEY, QUESTION, VECTOR_SIZE, WRITER, Capital, report, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def model(name: str, **options: object) -> OpenAILike:
    at = {"api_base": BASE_URL, "api_key": KEY, "max_retries": 0, "temperature": 0, "is_chat_model": True}
    return OpenAILike(model=name, **at | options)


def chat() -> None:
    assert model(WRITER, max_tokens=8).complete(QUESTION).text


def completions() -> None:
    assert model(WRITER, max_tokens=8, is_chat_model=False).complete("import os\n").text


def stream() -> None:
    assert "".join(part.delta for part in model(WRITER, max_tokens=8).stream_complete(QUESTION))


def structured() -> None:
    llm = model(CALLER, is_function_calling_model=True)
    assert isinstance(llm.structured_predict(Capital, PromptTemplate(QUESTION)), Capital)


def structured_by_schema() -> None:
    llm = model(WRITER, should_use_structured_outputs=True)
    assert isinstance(llm.structured_predict(Capital, PromptTemplate(QUESTION)), Capital)


async def agent() -> None:
    agent = FunctionAgent(tools=[weather], llm=model(CALLER, is_function_calling_model=True))
    assert str(await agent.run(QUESTION)).startswith(ANSWER)


def embeddings() -> None:
    vectors = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=BASE_URL, api_key=KEY)
    assert [len(each) for each in vectors.get_text_embedding_batch(["import os", "def f(): pass"])] == [VECTOR_SIZE] * 2


if __name__ == "__main__":
    report(chat, completions, stream, structured, structured_by_schema, agent, embeddings)
