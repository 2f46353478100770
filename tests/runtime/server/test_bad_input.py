"""What is wrong with a request is told to its sender, in OpenAI's shape, and to nobody else."""

import json
import threading

import openai
import pytest

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.server.body import RequestModel
from kvasir_runtime.server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "the quick brown fox"}


def post(running, path: str, content: object) -> tuple[int, dict]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    response = running.http.post(path, content=body)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


BAD_COMPLETIONS = [
    # what is sent beside the prompt, the field at fault, what the message says
    ({"max_tokens": -1}, "max_tokens", "-1 was given, but it should be greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1 token"),
    ({"max_tokens": 10**9}, "max_tokens", "the model's context is 512 tokens"),
    ({"max_tokens": 10**40}, "max_tokens", "the model's context is 512 tokens"),
    ({"max_tokens": "ten"}, "max_tokens", '"ten" was given, but it should be a valid integer'),
    ({"max_tokens": True}, "max_tokens", "true was given, but it should be a valid integer"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "more than max_tokens, which is 3"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "at most 128 per prompt"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 1e31}, "temperature", "less than or equal to 1"),
    ({"max_tokens": 5.5}, "max_tokens", "valid integer"),
    ({"n": -1.0}, "n", "greater than or equal to 1"),
    ({"request_id": ""}, "request_id", "at least 1 character"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": float("nan")}, "temperature", "finite number"),
    ({"temperature": float("inf")}, "temperature", "finite number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.01}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"seed": "x"}, "seed", "valid integer"),
    ({"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
    ({"stop": ["a", 5]}, "stop[1]", "5 was given, but it should be a valid string"),
    ({"stop": ["x"] * 33}, "stop", "at most 32 items"),
    ({"stop": "x" * 1025}, "stop", "at most 1024 characters"),
    ({"stop": ["a", "x" * 1025]}, "stop[1]", "at most 1024 characters"),
    ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "not in the vocabulary"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "'99999' is no token id"),
    ({"logit_bias": {str(token): 1 for token in range(1023)} | {"x": 1}}, "logit_bias", "is no token id"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024 items"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"n": 2, "best_of": 1}, "best_of", "best_of is 1, fewer than n, which is 2"),
    ({"best_of": 129}, "best_of", "at most 128 per prompt"),
    ({"best_of": 3, "stream": True}, "best_of", "with stream: true"),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of", "fewer than n"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "hypotheses end at token ids only"),
    ({"use_beam_search": True, "logprobs": 0}, "logprobs", "cannot be used with use_beam_search"),
    ({"use_beam_search": True, "best_of": 65}, "use_beam_search", "at most 64 sequences together"),
    ({"length_penalty": 1.5}, "length_penalty", "only allowed with use_beam_search"),
    ({"early_stopping": True}, "early_stopping", "only allowed with use_beam_search"),
    ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping", "valid boolean"),
    ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping", "should be 'never'"),
    (
        {"use_beam_search": True, "length_penalty": 1e6},
        "length_penalty",
        "1000000.0 was given, but it should be less than or equal to 10",
    ),
    (
        {"use_beam_search": True, "length_penalty": -2000},
        "length_penalty",
        "-2000 was given, but it should be greater than or equal to -10",
    ),
    ({"prompt": ["a"] * 2049}, "prompt", "2049 prompts were given, but this server makes at most 2048 sequences"),
    ({"prompt": [[5]] * 1025, "n": 2}, "prompt", "1025 prompts were given in 2 sequences each"),
    ({"prompt": ["a", 5]}, "prompt", "should be a text"),
    ({"prompt": [5, True]}, "prompt", "should be a text"),
    ({"prompt": [True]}, "prompt", "should be a text"),
    ({"prompt": [[]]}, "prompt", "it is empty"),
    ({"prompt": [5] * 511 + [10**6]}, "prompt", "the prompt has 512 tokens"),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "at most 1024 items"),
    ({"suffix": "end"}, "suffix", "does not support it"),
    ({"no_stop_trim": True}, "no_stop_trim", "does not support it"),
    ({"return_hidden_states": True}, "return_hidden_states", "does not support it"),
    ({"typical_p": 0.9}, "typical_p", "does not support it"),
    ({"stop_regex": "a+", "user": "u"}, "stop_regex", "does not support it"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ({"n_predict": 1}, "n_predict", "unknown field 'n_predict' in the request; leave it out"),
    ({"stream": True, "stream_options": {"zzz": 1}}, "stream_options.zzz", "unknown field 'zzz' in stream_options"),
    ({"prompt": ""}, "prompt", "it is empty"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": None}, "prompt", "nothing was given"),
    ({"prompt": 5}, "prompt", "5 was given"),
    ({"prompt": ["a", 5]}, "prompt", "should be a text"),
    ({"prompt": [5, 10**6]}, "prompt", "token id 1000000 is not in the vocabulary"),
    ({"prompt": [-1]}, "prompt", "token id -1 is not in the vocabulary"),
    ({"prompt": [5] * 512}, "prompt", "the prompt has 512 tokens, but the model's context is 512 tokens"),
    ({"prompt": "ab " * 2_000_000}, "prompt", "the prompt has 6000000 characters"),
]


@pytest.mark.parametrize(("wrong", "param", "message"), BAD_COMPLETIONS)
def test_wrong_completion_is_refused_by_the_field_at_fault(running, wrong, param, message) -> None:
    status, error = post(running, "/v1/completions", {**TEXT, **wrong})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert running.core.received == []


TOOLS = [{"type": "function", "function": {"name": "f"}}]
BAD_CHATS = [
    ({"messages": []}, "messages", "[] was given, but it should have at least 1 item, not 0"),
    ({"messages": "hi"}, "messages", "valid array"),
    ({"messages": None}, "messages", "valid array"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "is required"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", '"wizard" was given'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5 was given"),
    ({"messages": [{"role": "user", "content": "a", "zzz": 1}]}, "messages[0].zzz", "unknown field 'zzz'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "only content parts of type 'text'",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", '"custom" was given'),
    ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "at least 1 character"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "[] was given"),
    ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    ({"tool_choice": "required"}, "tool_choice", "no tools were given"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools has a mode"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
        "tool_choice",
        "tools, at least one",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "has a function with a name"),
    ({"tools": TOOLS, "tool_choice": "f"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "'function' or 'allowed_tools'"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, "tool_choice", "'function' or 'allowed_tools'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "names 'g'"),
    ({"tools": TOOLS, "use_beam_search": True}, "use_beam_search", "with tools"),
    ({"web_search_options": {}}, "web_search_options", "does not support it"),
    ({"truncation_side": "right"}, "truncation_side", "does not support it"),
    ({"messages": [{"role": "user", "content": "a", "tools": []}]}, "messages[0].tools", "unknown field 'tools'"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0].prefix", "not support it"),
    ({"top_logprobs": 3}, "top_logprobs", "only allowed with logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set messages"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens", "max_completion_tokens is 1000000000 and the prompt"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "at least 1 token"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "the model's context is 512 tokens"),
]


@pytest.mark.parametrize(("wrong", "param", "message"), BAD_CHATS)
def test_wrong_chat_is_refused_by_the_field_at_fault(running, wrong, param, message) -> None:
    status, error = post(running, "/v1/chat/completions", {**CHAT, **wrong})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert running.core.received == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b"[1, 2]", "should be an object"),
        (b'{"prompt": "\xff"}', "not valid UTF-8: byte 0xff at position 12"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_body_that_is_no_json_object_is_refused(running, body: bytes, message: str) -> None:
    status, error = post(running, "/v1/completions", body)
    assert status == 400
    assert message in error["message"]


@pytest.mark.parametrize(
    ("model", "required"),
    [
        (CompletionRequest, TEXT),
        (ChatCompletionRequest, CHAT),
        (TokenizeTextRequest, TEXT),
        (TokenizeChatRequest, CHAT),
        (DetokenizeRequest, {"tokens": [1]}),
        (StreamOptions, {}),
        (ChatMessage, {"role": "assistant", "content": "hi"}),
    ],
)
def test_null_means_not_given_in_every_field(model: type[RequestModel], required: dict) -> None:
    not_given = model.model_validate_json(json.dumps(required)).model_dump()
    for field in model.model_fields.keys() - required.keys():
        assert model.model_validate_json(json.dumps(required | {field: None})).model_dump() == not_given, field


def test_a_body_of_nothing_but_mistakes_is_refused_without_listing_them(running) -> None:
    status, error = post(running, "/v1/completions", {f"k{index}": 1 for index in range(1001)})
    assert (status, error["message"][:38]) == (400, "1001 fields of the request are unknown")
    messages = [1] * 100_000
    status, error = post(running, "/v1/chat/completions", {"messages": messages})
    assert (status, error["param"]) == (400, "messages[0]")


def test_a_text_that_the_tokenizer_knows_more_tokens_for_than_the_model_is_refused(start_server) -> None:
    with start_server(vocab_size=250) as running:
        text = "the quick brown fox"
        assert max(running.tokenizer.encode(text).ids) >= 250
        for path, body, param in [
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ]:
            status, error = post(running, path, body)
            assert (status, error["param"]) == (400, param)
            assert "the model's ids end at 249" in error["message"]
        assert running.core.received == []


def test_prompt_longer_than_the_context_has_openais_code(running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        running.client.completions.create(model="tiny", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_model_is_not_found_and_the_known_are_named(running) -> None:
    with pytest.raises(openai.NotFoundError, match="known: 'tiny'") as caught:
        running.client.completions.create(model="gpt-9", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_route_that_does_not_exist_is_named(running) -> None:
    status, error = post(running, "/v1/audio/speech", {})
    assert (status, error["code"]) == (404, "route_not_found")
    assert "POST /v1/audio/speech" in error["message"]


def test_method_that_a_route_does_not_take_is_told_the_right_one(running) -> None:
    response = running.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "use POST" in response.json()["error"]["message"]


def test_request_that_the_engine_gives_up_is_a_server_error(running) -> None:
    running.core.error = "the step failed: no memory"
    for stream in (False, True):
        status, error = post(running, "/v1/completions", {**TEXT, "stream": stream})
        assert (status, error["message"], error["code"]) == (500, "the step failed: no memory", "request_failed")


def test_request_that_is_larger_than_the_engine_is_its_senders_error(running) -> None:
    running.core.error, running.core.is_too_large = "the beam search of width 4 outgrew the KV cache", True
    status, error = post(running, "/v1/completions", TEXT)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "request_too_large")
    assert error["message"] == running.core.error


def test_bad_requests_leave_a_stream_beside_them_unharmed(running) -> None:
    running.core.step_seconds = 0.01
    options = {"model": "tiny", "prompt": "the quick brown fox größer 日本語", "max_tokens": 400}
    texts: list[str] = []

    def read_stream() -> None:
        stream = running.client.completions.create(stream=True, **options)
        texts.append("".join(chunk.choices[0].text for chunk in stream))

    reader = threading.Thread(target=read_stream)
    reader.start()
    running.core.wait_until(lambda core: core.received)
    for wrong, _, _ in BAD_COMPLETIONS[::6]:
        post(running, "/v1/completions", {**TEXT, **wrong})
    post(running, "/v1/chat/completions", b"\xff")
    post(running, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000_000}]})
    assert reader.is_alive(), "the stream should still have been running"
    running.core.step_seconds = 0.0005
    reader.join()
    assert texts == [running.client.completions.create(**options).choices[0].text]


def test_sequences_beyond_what_the_engine_is_to_hold_are_sent_away(start_server) -> None:
    with start_server(config=ServerConfig(max_sequences_in_flight=3)) as running:
        running.core.is_hanging = True
        first = threading.Thread(target=running.http.post, args=("/v1/completions",), kwargs={"json": {**TEXT, "n": 2}})
        first.start()
        running.core.wait_until(lambda core: core.received)
        status, error = post(running, "/v1/completions", {**TEXT, "n": 2})
        assert (status, error["code"]) == (503, "unavailable")
        assert "works on 2 sequences and takes no more than 3" in error["message"]
        running.core.is_hanging = False
        assert running.http.post("/v1/completions", json=TEXT).status_code == 200
        first.join()
        assert running.http.post("/v1/completions", json={**TEXT, "n": 3}).status_code == 200
        status, error = post(running, "/v1/completions", {**TEXT, "n": 4})  # which there will never be room for
        assert (status, "at most 3" in error["message"]) == (400, True)


def test_body_over_the_limit_is_too_large(start_server) -> None:
    with start_server(config=ServerConfig(max_body_bytes=1000)) as running:
        status, error = post(running, "/v1/completions", {"prompt": "x" * 2000})
        assert (status, error["code"]) == (413, "body_too_large")
        assert "at most 1000" in error["message"]
        chunked = running.http.post("/v1/completions", content=iter([b"x" * 600, b"x" * 600]))
        assert chunked.status_code == 413
