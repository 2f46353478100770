"""LiteLLM, as its `hosted_vllm` and `openai` providers speak to a service."""

import json
import os

from features import (
    ANSWER,
    BASE_URL,
    CALLER,
    CITY_SCHEMA,
    EMBEDDER,
    KEY,
    QUESTION,
    URL,
    VECTOR_SIZE,
    WRITER,
    Capital,
    report,
)

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else prices are fetched
import litellm

ASKED = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY_SCHEMA}}
PROVIDERS = ("hosted_vllm", "openai")
AT = {"api_base": BASE_URL, "api_key": KEY}


def chat() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(model=f"{provider}/{WRITER}", messages=ASKED, max_tokens=8, temperature=0, **AT)
        assert answer.choices[0].message.content


def stream() -> None:
    for provider in PROVIDERS:
        chunks = litellm.completion(
            model=f"{provider}/{WRITER}", messages=ASKED, max_tokens=8, temperature=0, stream=True, **AT
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools() -> None:
    for provider in PROVIDERS:
        asked = {"model": f"{provider}/{CALLER}", "tools": [TOOL], "temperature": 0} | AT
        message = litellm.completion(messages=ASKED, **asked).choices[0].message
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        told = {"role": "tool", "tool_call_id": call.id, "content": "12"}
        answer = litellm.completion(messages=[*ASKED, message, told], **asked)
        assert answer.choices[0].message.content.startswith(ANSWER)


def structured() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(model=f"{provider}/{WRITER}", messages=ASKED, response_format=Capital, **AT)
        Capital.model_validate_json(answer.choices[0].message.content)


def responses() -> None:
    for provider in PROVIDERS:
        answer = litellm.responses(model=f"{provider}/{CALLER}", input="Hello", temperature=0, **AT)
        assert "Hello!" in str(answer.output)


def messages() -> None:
    answer = litellm.completion(
        model=f"anthropic/{WRITER}", messages=ASKED, max_tokens=8, temperature=0, api_base=URL, api_key=KEY
    )
    assert answer.choices[0].message.content


def cache_control() -> None:
    """A hint for another provider, which LiteLLM passes on."""
    part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    for provider in PROVIDERS:
        asked = [{"role": "user", "content": [part]}]
        assert litellm.completion(
            model=f"{provider}/{WRITER}", messages=asked, max_tokens=8, temperature=0, **AT
        ).choices


def embeddings() -> None:
    for provider in PROVIDERS:
        answer = litellm.embedding(
            model=f"{provider}/{EMBEDDER}", input=["import os", "def f(): pass"], encoding_format="float", **AT
        )
        assert [len(each["embedding"]) for each in answer.data] == [VECTOR_SIZE] * 2


async def asynchronous() -> None:
    answer = await litellm.acompletion(model=f"hosted_vllm/{WRITER}", messages=ASKED, max_tokens=8, temperature=0, **AT)
    assert answer.choices[0].message.content


if __name__ == "__main__":
    report(chat, stream, tools, structured, responses, messages, cache_control, embeddings, asynchronous)
