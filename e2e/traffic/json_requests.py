"""Requests of several APIs whose answers are JSON of some length, and those answers as a service gives them whole."""

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

NUM_NUMBERS = 200
"""In an answer, which takes three tokens for each."""
NUMBERS = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": NUM_NUMBERS,
            "maxItems": NUM_NUMBERS,
        }
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
QUESTION = "Sort some numbers."
MESSAGES = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 1900
NAMED_SCHEMA = {"name": "numbers", "strict": True, "schema": NUMBERS}
FUNCTION = {"type": "function", "function": {"name": "sort", "strict": True, "parameters": NUMBERS}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": MAX_TOKENS,
            "tools": [FUNCTION],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "json_schema": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": MAX_TOKENS,
            "response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA},
        },
    ),
    "responses": (
        "responses",
        {
            "input": QUESTION,
            "max_output_tokens": MAX_TOKENS,
            "text": {"format": {"type": "json_schema"} | NAMED_SCHEMA},
        },
    ),
    "messages": (
        "messages",
        {
            "messages": MESSAGES,
            "max_tokens": MAX_TOKENS,
            "tools": [{"name": "sort", "strict": True, "input_schema": NUMBERS}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
}


@dataclass(frozen=True)
class JsonRequest:
    """`path` lies behind the URL of the API; the client adds to `body` which model answers, and how."""

    path: str
    body: dict[str, Any]
    answer: Any
    """Parsed: what the same request is answered with at temperature 0, whole."""
    next_turn: None = None


def json_request(name: str, url: str, model: str) -> JsonRequest:
    """One of REQUESTS, asked of the API at `url` once."""
    path, body = REQUESTS[name]
    asked = json.dumps(body | {"model": model, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/{path}", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = said_whole(json.load(response))
    assert len(answer["numbers"]) == NUM_NUMBERS, f"not held to its schema: {answer}"
    return JsonRequest(path, body, answer)


def said_whole(answer: dict[str, Any]) -> Any:
    """What the one text or call of an answer holds."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        [call] = message.get("tool_calls") or [None]
        return json.loads(message["content"] if call is None else call["function"]["arguments"])
    if "output" in answer:
        return json.loads(answer["output"][0]["content"][0]["text"])
    return answer["content"][0]["input"]
