"""DSPy: a language model of its own, signatures held by structured output, and embeddings."""

import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else prices are fetched
import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from features import BASE_URL, EMBEDDER, KEY, QUESTION, VECTOR_SIZE, WRITER, report

AT = {"api_base": BASE_URL, "api_key": KEY}
# DSPy asks for structured output where it is told that a model has it.
register_provider(
    ProviderDefinition.chat(AccessPolicy(provider="kvasir", base_url=BASE_URL), compat=OpenAIChatCompat()),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


class Place(dspy.Signature):
    """Name the place."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()


def model(**options: object) -> dspy.LM:
    return dspy.LM(f"kvasir/{WRITER}", **AT, cache=False, **options)


def chat() -> None:
    [answer] = model(max_tokens=8, temperature=0)(QUESTION)
    assert answer


def text() -> None:
    assert model(max_tokens=8, temperature=0, model_type="text")("import os\n")


def structured() -> None:
    with dspy.context(lm=model(max_tokens=400), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Place)(question=QUESTION).city in ("Paris", "Rome")


def embeddings() -> None:
    vectors = dspy.Embedder(f"openai/{EMBEDDER}", **AT, encoding_format="float")(["import os", "def f(): pass"])
    assert vectors.shape == (2, VECTOR_SIZE)


if __name__ == "__main__":
    report(chat, text, structured, embeddings)
