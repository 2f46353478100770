"""A body that is right but for one value, whatever stands in that value's place, is answered or refused by name: no
endpoint has a defect that a value of an unexpected kind shows, and the server goes on serving.
"""

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
USER = {"role": "user", "content": "the quick brown fox"}
SAMPLED = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "stop": ["x"],
    "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "repetition_penalty": 1.1,
    "user": "u", "metadata": {"a": "b"}, "min_tokens": 1,
    "bad_words": ["fox"], "allowed_token_ids": [1, 2], "stop_token_ids": [3], "cache_salt": "x", "priority": 0,
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "weather in Paris"}]},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                USER,
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 2,
        },
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": True},
            "stream": True,
            "max_tokens": 2,
        },
        {"messages": [USER], "logprobs": True, "top_logprobs": 2, "max_tokens": 2} | SAMPLED,
    ],
    "/v1/completions": [
        {"prompt": "fox", "max_tokens": 2, "echo": True, "logprobs": 1, "structured_outputs": {"regex": "a+"}},
        {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "structured_outputs": {"choice": ["yes", "no"]}},
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "weather in Paris"}]},
                {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
            ],
            "instructions": "i",
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "c"}]},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 16,
        }
    ],
    "/v1/messages": [
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "weather in Paris"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
            ],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
        }
    ],
    "/tokenize": [{"messages": [USER], "tools": [{"type": "function", "function": {"name": "weather"}}]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/abort_requests": [{"request_ids": ["a"]}],
}
NESTED: Any = 0
for _ in range(100):
    NESTED = [NESTED]
VALUES = [
    None,
    "",
    "nope",
    -1,
    1.5,
    1e308,
    10**30,
    True,
    [],
    {},
    [None],
    [[]],
    [{}],
    {"type": None},
    float("nan"),
    NESTED,
]
VALUES_A_PLACE = 5


def bodies(given: Any) -> Iterator[Any]:
    """Of a body others with one value replaced or left out; every place gets some of the values, by turns."""
    turns = itertools.cycle(VALUES)
    for place in places(given):
        for value in itertools.islice(turns, VALUES_A_PLACE):
            body = copy.deepcopy(given)
            owner = inside(body, place[:-1])
            owner[place[-1]] = copy.deepcopy(value)
            yield body
        body = copy.deepcopy(given)
        del inside(body, place[:-1])[place[-1]]
        yield body


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*here, key)
        yield from places(entry, (*here, key))


def inside(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_any_kind_in_any_place_is_served_or_refused_by_name(running, path: str) -> None:
    for given in BODIES[path]:
        for body in bodies(given):
            answer = running.http.post(path, content=json.dumps(body).encode())
            assert answer.status_code in (200, 400, 404), f"{answer.text} of {body}"
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], body
