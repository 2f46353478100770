"""What clients of other servers send besides: hints are accepted and named once, wishes that ask for nothing pass."""

import logging

import pytest

CHAT = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 3, "temperature": 0}
PARTS = [{"type": "text", "text": "the quick brown fox", "cache_control": {"type": "ephemeral"}}]
CAME_BACK = {
    "role": "assistant",
    "content": "a",
    "id": "msg_1",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "thinking_blocks": [],
    "provider_specific_fields": {"x": 1},
}


def text_of(running, body: dict[str, object]) -> str:
    response = running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": PARTS}]},
        {"messages": [{**CHAT["messages"][0], "id": "1", "cache_control": {"type": "ephemeral"}}]},
        # OpenAI's own
        {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex", "store": True},
        {"stream_options": None, "metadata": {"a": "b"}, "prompt_cache_options": {"ttl": "30m"}, "verbosity": "low"},
        # of gateways
        {"reasoning": {"effort": "low"}, "provider": {"sort": "price"}, "transforms": [], "usage": {"include": True}},
        {"thinking": {"type": "enabled"}, "enable_thinking": False, "num_retries": 2, "litellm_trace_id": "t"},
        # vLLM's, SGLang's and llama.cpp's at their defaults
        {"thinking_token_budget": None, "session_id": None, "vllm_xargs": None, "logprob_token_ids": None,
         "mm_processor_kwargs": None, "truncation_side": None, "length_penalty": 1.0, "bad_words": [], "echo": False},
        {"regex": None, "lora_path": None, "rid": None, "return_hidden_states": False, "bootstrap_room": None},
        {"cache_prompt": True, "typical_p": 1.0, "mirostat": 0, "n_probs": 0, "samplers": []},
    ],
)  # fmt: skip
def test_they_leave_the_answer_as_it_is(running, more: dict[str, object]) -> None:
    assert text_of(running, {**CHAT, **more}) == text_of(running, CHAT)


def test_a_message_that_comes_back_from_another_server_is_taken(running) -> None:
    plain = {key: CAME_BACK[key] for key in ("role", "content")}
    [question] = CHAT["messages"]
    answers = [text_of(running, {**CHAT, "messages": [question, each, question]}) for each in (plain, CAME_BACK)]
    assert answers[0] == answers[1]


def test_hints_are_named_once_in_the_log(running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvasir_runtime"):
        for _ in range(2):
            text_of(running, {**CHAT, "litellm_call_id": "1", "litellm_session_id": "2"})
    named = [record.message for record in caplog.records if "litellm" in record.message]
    assert named == ["clients send fields that mean nothing here: litellm_call_id, litellm_session_id"]
