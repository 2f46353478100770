"""Fields of /v1/chat/completions mean the same in other APIs of conversations, whose own words have none for them."""

from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 4},
}
OTHERS = [path for path in BODIES if path != "/v1/chat/completions"]
FIELDS: list[dict[str, Any]] = [
    {"allowed_token_ids": [5, 6, 7]},
    {"bad_words": ["fox"]},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_regex": "[0-9]+"},
    {"logit_bias": {"5": 3.0}, "seed": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    {"ignore_eos": True, "min_tokens": 2, "stop_token_ids": [9], "stop": ["zzz"]},
    {"truncate_prompt_tokens": 3},
    {"priority": 3, "cache_salt": "salt"},
    {"use_beam_search": True, "best_of": 2},
]


def ask(running: Any, path: str, fields: dict[str, Any]) -> Any:
    return running.http.post(path, json={"model": "tiny", "temperature": 0, "seed": 1, **BODIES[path], **fields})


def spec_of(running: Any, path: str, fields: dict[str, Any]) -> Any:
    """What reaches the core."""
    response = ask(running, path, fields)
    assert response.status_code == 200, response.text
    return running.core.received[-1].spec


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(fields))
def test_they_reach_the_engine_as_chats_do(running, path: str, fields: dict[str, Any]) -> None:
    asked = spec_of(running, "/v1/chat/completions", fields)
    assert spec_of(running, path, fields) == asked
    assert spec_of(running, path, {}) != asked


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields", [{"logits_processors": ["x"]}, {"xtc_probability": 0.5}, {"allowed_token_ids": []}, {"bad_words": "fox"}]
)
def test_what_cannot_be_done_is_refused_by_name(running, path: str, fields: dict[str, Any]) -> None:
    response = ask(running, path, fields)
    assert response.status_code == 400
    assert next(iter(fields)) in response.json()["error"]["message"]


@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": True}, {"prompt_logprobs": 1}, {"return_token_ids": True}])
def test_what_an_answer_has_no_place_for_is_refused_by_name(running, path: str, fields: dict[str, Any]) -> None:
    response = ask(running, path, fields)
    assert response.status_code == 400
    assert f"{next(iter(fields))}: an answer of this API" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", OTHERS)
def test_what_asks_for_nothing_is_taken(running, path: str) -> None:
    fields = {"n": 1, "logprobs": False, "best_of": None, "stream_options": {"include_obfuscation": False}}
    assert ask(running, path, fields).status_code == 200
