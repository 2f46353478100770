"""What the scripts of all Python clients share: where the service is, what they ask it, and how they say what worked.

A script hands its functions to `report`; each is one feature, named as in docs/clients.md, and fails by raising.
"""

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL = os.environ["KVASIR_URL"]
BASE_URL = f"{URL}/v1"
KEY = "none"
WRITER = "writer"
CALLER = "caller"
EMBEDDER = "embedder"
MODELS = {WRITER, CALLER, EMBEDDER, "coder"}
QUESTION = "What is the weather in Paris?"
ANSWER = "The weather in Paris is "
"""So `caller` begins when its tool has told it something; it is too small to say the number right each time."""
VECTOR_SIZE = 96
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class Capital(BaseModel):
    """An answer that ends soon, whatever a model would rather write."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    is_capital: bool


def weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris", city
    return "12"


def refusal(kind: type[Exception], ask: Callable[..., Any], **asked: Any) -> Any:
    """The error with which a call ends."""
    try:
        answer = ask(**asked)
    except kind as error:
        return error
    raise AssertionError(f"{asked} was answered with {answer}")


def report(*features: Callable[[], Any]) -> None:
    """One line of JSON for each, as it ends. They share an event loop, as clients' pools of connections ask for."""
    with asyncio.Runner() as runner:
        for feature in features:
            line = {"feature": feature.__name__.replace("_", " "), "error": error_of(feature, runner)}
            print(json.dumps(line), flush=True)


def error_of(feature: Callable[[], Any], runner: asyncio.Runner) -> str | None:
    try:
        result = feature()
        if inspect.iscoroutine(result):
            runner.run(result)
    except Exception:
        return traceback.format_exc()
    return None
