"""POST /v1/completions, asked through the official client."""

import json
from pathlib import Path

import pytest

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.logprobs import LogprobsFormatter

PROMPT = "the quick brown fox größer 日本語 😀"


def test_text_and_token_ids_of_one_prompt_are_answered_alike(running) -> None:
    token_ids = running.tokenizer.encode(PROMPT).ids
    answers = [
        running.client.completions.create(model="tiny", prompt=prompt, max_tokens=6) for prompt in (PROMPT, token_ids)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert running.core.received[0].spec.prompt_token_ids == running.core.received[1].spec.prompt_token_ids == token_ids


def test_choices_of_several_prompts_come_in_their_order(running) -> None:
    answer = running.client.completions.create(model="tiny", prompt=["the quick", "def main()"], n=2, max_tokens=2)
    firsts = [running.tokenizer.decode(running.tokenizer.encode(text).ids[:2]) for text in ("the quick", "def main()")]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [firsts[0], firsts[0], firsts[1], firsts[1]]
    num_prompt_tokens = sum(len(running.tokenizer.encode(text).ids) for text in ("the quick", "def main()"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt_tokens, 8)


@pytest.mark.parametrize("echo", [False, True])
def test_stream_adds_up_to_the_whole_answer(running, echo: bool) -> None:
    options = {"model": "tiny", "prompt": [PROMPT, "lazy 😀 dog"], "max_tokens": 25, "echo": echo, "logprobs": 1}
    whole = running.client.completions.create(**options)
    texts, tokens = ["", ""], [[], []]
    offsets = [[], []]
    for chunk in running.client.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("the <|im_start|>quick 😀!a", "the <|im_start|>quick 😀!a"),
        ([1, *(3 + b"!a"[0] - 33 for _ in range(2)), 2], "<|im_start|>!!<|im_end|>"),
        ("日本語 größer ", "日本語 größer "),
    ],
)
def test_an_offset_is_where_a_tokens_text_begins(running, prompt: str | list[int], text: str, echo: bool) -> None:
    [choice] = running.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=40, echo=echo, logprobs=0, extra_body={"ignore_eos": True}
    ).choices
    assert choice.text.startswith(text if echo else text[:2].replace("<|", "!!"))
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    for token, offset, end in zip(choice.logprobs.tokens, offsets, [*offsets[1:], len(choice.text)], strict=True):
        if end > offset and not token.startswith("bytes:"):
            assert choice.text[offset:end] == token


def test_no_offset_is_behind_a_text_that_a_stop_string_ends(running) -> None:
    [choice] = running.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=50, stop="quick brown", logprobs=0
    ).choices
    assert (choice.text, max(choice.logprobs.text_offset)) == ("the ", 4)


def test_every_token_has_an_entry_among_the_alternatives(model_folder: Path) -> None:
    """Parts of characters too, and tokens that are spelt alike."""
    tokenizer = Tokenizer.load(model_folder)
    halves = tokenizer.encode("日", add_special_tokens=False)
    padded = [tokenizer.vocab_size, tokenizer.vocab_size + 1]
    ids = [halves[1], *halves, *padded]
    position = TokenLogprobs(ids, [-0.5, -0.25, -0.5, -1.0, -2.0], rank=2)
    shaped = LogprobsFormatter(tokenizer, tokens_as_ids=False).completion(ids[:1], [position], [0])
    assert shaped.tokens == ["bytes:\\xa5"]
    [top] = shaped.top_logprobs
    assert top == {"bytes:\\xa5": -0.5, "bytes:\\xe6\\x97": -0.25, "": -1.0, f"token_id:{padded[1]}": -2.0}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("echo", "text"), [(True, "Hey you Hey"), (False, " Hey")])
def test_the_first_space_behind_a_prompt_is_kept(sentencepiece, is_stream: bool, echo: bool, text: str) -> None:
    token_ids = sentencepiece.tokenizer.encode("Hey you", add_special_tokens=False).ids
    for prompt in ("Hey you", token_ids):
        options = {"prompt": prompt, "max_tokens": 5 if prompt == "Hey you" else 4, "echo": echo, "logprobs": 0}
        answer = sentencepiece.client.completions.create(model="m", stream=is_stream, **options)
        choices = [choice for chunk in (answer if is_stream else [answer]) for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == text
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        begins = dict(zip(tokens, offsets, strict=True))
        assert text.rindex("H") == begins["H"]


def test_sixteen_tokens_are_made_when_the_client_does_not_say(running) -> None:
    assert running.client.completions.create(model="tiny", prompt=PROMPT).usage.completion_tokens == 16


def test_the_chat_routes_name_for_the_number_of_tokens_is_known_and_comes_first(running) -> None:
    for limits in ({"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 7}):
        running.http.post("/v1/completions", json={"prompt": [5, 6, 7], **limits})
    assert [request.spec.sampling.max_tokens for request in running.core.received] == [2, 2]


def test_null_for_the_number_of_tokens_means_the_rest_of_the_context(running) -> None:
    running.http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": None, "stop_token_ids": [6]})
    assert running.core.received[0].spec.sampling.max_tokens == 512 - 3


def test_echo_without_output_gives_the_log_probabilities_of_the_prompt(running) -> None:
    answer = running.client.completions.create(model="tiny", prompt="the quick", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("the quick", "length", 0)
    assert "".join(choice.logprobs.tokens) == "the quick"
    assert choice.logprobs.token_logprobs[0] is None
    assert set(choice.logprobs.token_logprobs[1:]) == {-0.5}


def test_token_ids_are_echoed_as_the_text_that_they_stand_for(running) -> None:
    token_ids = running.tokenizer.encode(PROMPT).ids
    answers = [
        running.client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, n=2)
        for prompt in (PROMPT, token_ids)
    ]
    assert [choice.text for answer in answers for choice in answer.choices] == [PROMPT] * 4


@pytest.mark.parametrize(
    ("most_tokens", "options"),
    [
        (1560, {"n": 128, "logprobs": 20}),
        (6553, {"n": 128, "logprobs": 4}),
        (3120, {"n": 64, "best_of": 128, "logprobs": 20}),
    ],
)
def test_prompts_are_not_echoed_beyond_all_measure(running, most_tokens: int, options: dict) -> None:
    """What may be echoed is refused for another reason, lest all of it is made."""
    for num_tokens, echo, param in ((most_tokens, True, None), (most_tokens + 1, True, "echo"), (6553, False, None)):
        prompts = [[5] * 500] * (num_tokens // 500) + [[5] * (num_tokens % 500)]
        body = json.dumps({"prompt": prompts, "max_tokens": 1, "echo": echo, **options})
        journal = '{"request_id": "r", "created": 0, "seeds": [], "model": "of a stream"}\n'
        answer = running.http.post(
            "/v1/completions", content=body + journal, headers={"x-kvasir-journal-at": str(len(body))}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert ("ask for fewer sequences or logprobs" if param else "continues streams only") in error["message"]


def test_token_ids_are_returned_as_vllm_shapes_them(running) -> None:
    wishes = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "return_token_ids": True}
    whole = running.http.post("/v1/completions", json=wishes).json()
    token_ids = running.tokenizer.encode(PROMPT).ids
    assert whole["choices"][0]["prompt_token_ids"] == token_ids
    assert whole["choices"][0]["token_ids"] == token_ids[:3]


def test_sampling_reaches_the_core_as_it_was_asked_for(running) -> None:
    running.client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=9,
        temperature=1.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "6": 2.5},
        seed=-1,
        logprobs=4,
        extra_body={"min_p": 0.1, "top_k": 7, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": [9]},
    )
    sampling = running.core.received[0].spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.5, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (9, 4, 4)
    assert (sampling.logit_bias, sampling.seed) == ({5: -100.0, 6: 2.5}, 2**64 - 1)
    assert sampling.stop_token_ids[0] == 9


def test_priority_salt_and_tenant_reach_the_core(running) -> None:
    running.http.post(
        "/v1/completions",
        json={"prompt": "the", "priority": -3, "cache_salt": "team-a"},
        headers={"X-Kvasir-Tenant": "blue"},
    )
    [request] = running.core.received
    assert (request.spec.priority, request.spec.cache_salt, request.spec.tenant) == (-3, "team-a", "blue")


def test_stop_string_is_shown_when_asked_for(running) -> None:
    answer = running.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=50, stop=["brown"], extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "the quick brown"


def test_harmless_fields_are_taken_as_vllm_takes_them(running) -> None:
    fields = {"request_id": "mine", "detokenize": False, "temperature": 2.5, "max_tokens": 5.0, "top_k": 3.0}
    answer = running.http.post("/v1/completions", json={"prompt": "abc", "logprobs": True, **fields}).json()
    [request] = running.core.received
    sampling = request.spec.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k, sampling.logprobs) == (2.5, 5, 3, 1)
    assert answer["id"] == "cmpl-mine"
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) > 0
