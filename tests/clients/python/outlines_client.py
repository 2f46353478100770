"""Outlines, as it speaks to vLLM's server and to OpenAI's."""

import re
from typing import Literal

import openai
import outlines
from features import BASE_URL, KEY, QUESTION, WRITER, Capital, report

CLIENT = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
AS_VLLM = outlines.from_vllm(CLIENT, WRITER)
AS_OPENAI = outlines.from_openai(CLIENT, WRITER)


def chat() -> None:
    for model in (AS_VLLM, AS_OPENAI):
        assert model(QUESTION, max_tokens=8, temperature=0)


def stream() -> None:
    for model in (AS_VLLM, AS_OPENAI):
        assert "".join(model.stream(QUESTION, max_tokens=8, temperature=0))


def structured() -> None:
    for model in (AS_VLLM, AS_OPENAI):
        Capital.model_validate_json(model(QUESTION, Capital))


def choice() -> None:
    assert AS_VLLM(QUESTION, Literal["Paris", "Rome"]) in ("Paris", "Rome")


def regex() -> None:
    assert re.fullmatch("[0-9]{3}", AS_VLLM(QUESTION, outlines.regex("[0-9]{3}")))


def grammar() -> None:
    lark = 'start: "yes" | "no"'
    assert AS_VLLM(QUESTION, outlines.cfg(lark)) in ("yes", "no")


if __name__ == "__main__":
    report(chat, stream, structured, choice, regex, grammar)
