"""POST /v1/chat/completions, asked through the official client."""

import pytest

from kvasir_runtime.engine.messages import Abort

PROMPT = "größer 日本語 😀 the quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]


def test_answer_has_the_text_the_usage_and_the_reason_of_its_end(running) -> None:
    running.core.num_cached_tokens = 3
    answer = running.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content.startswith("user\n")  # the core repeats the prompt; <|im_start|> is skipped
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_messages_become_the_prompt_that_the_template_makes(running) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    running.client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    text = running.tokenizer.decode(running.core.received[0].spec.prompt_token_ids, skip_special_tokens=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_final_message_is_continued_where_it_ends(running) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is "}]
    running.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, extra_body={"continue_final_message": True}
    )
    text = running.tokenizer.decode(running.core.received[0].spec.prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")


@pytest.mark.parametrize("options", [{"max_tokens": 40}, {"max_tokens": 40, "stop": ["brown f", "nothing"]}, {"n": 3}])
def test_stream_adds_up_to_the_whole_answer(running, options) -> None:
    options = {"max_tokens": 30, "model": "tiny", "messages": MESSAGES, "extra_body": {"ignore_eos": True}, **options}
    whole = running.client.chat.completions.create(**options)
    texts = [""] * len(whole.choices)
    reasons = [None] * len(whole.choices)
    for chunk in running.client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_stream_begins_with_the_role_and_ends_with_the_usage(running) -> None:
    chunks = list(
        running.client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)


def test_continuous_usage_counts_up(running) -> None:
    chunks = running.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_stop_string_ends_the_text_before_it_and_the_request_in_the_core(running) -> None:
    answer = running.client.chat.completions.create(model="tiny", messages=MESSAGES, stop="quick", max_tokens=200)
    [choice] = answer.choices
    assert choice.message.content.endswith("😀 the ")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "quick")
    running.core.wait_until(lambda core: core.aborted == [Abort(core.received[0].request_id, 0)])


def test_end_of_sequence_token_stops_and_is_not_shown(running) -> None:
    answer = running.client.chat.completions.create(model="tiny", messages=MESSAGES)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", f"user\n{PROMPT}")
    assert choice.stop_reason == running.tokenizer.token_to_id("<|im_end|>")


def test_logprobs_name_each_token_its_bytes_and_the_alternatives(running) -> None:
    answer = running.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2
    )
    [choice] = answer.choices
    content = choice.logprobs.content
    shown = b"".join(bytes(token.bytes) for token in content[1:])  # the first is <|im_start|>
    assert shown.decode(errors="replace") == choice.message.content
    assert [(token.logprob, len(token.top_logprobs)) for token in content] == [(-0.5, 2)] * 12


def test_sequences_of_one_request_have_seeds_of_their_own(running) -> None:
    running.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, n=3, seed=7)
    running.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, n=3, seed=7)
    first, second = ([start.seed for start in request.sequences] for request in running.core.received)
    assert first[0] == 7
    assert len(set(first)) == 3
    assert first == second


def test_checkpoint_recommends_what_the_client_leaves_open(running) -> None:
    running.client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    running.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, temperature=0, extra_body={"top_k": -1, "ignore_eos": True}
    )
    left_open, asked = (request.spec.sampling for request in running.core.received)
    end_of_turn = running.tokenizer.token_to_id("<|im_end|>")
    assert (left_open.temperature, left_open.top_k, left_open.stop_token_ids) == (0.6, 20, (0, end_of_turn))
    assert (asked.temperature, asked.top_k, asked.stop_token_ids) == (0.0, None, ())


def test_output_may_fill_the_rest_of_the_context_by_default(running) -> None:
    running.client.chat.completions.create(model="tiny", messages=MESSAGES, stop="user")
    [request] = running.core.received
    assert request.spec.sampling.max_tokens == 512 - request.spec.num_prompt_tokens


def test_token_ids_are_returned_as_vllm_shapes_them(running) -> None:
    wishes = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "return_token_ids": True}
    whole = running.http.post("/v1/chat/completions", json=wishes).json()
    prompt = running.core.received[0].spec.prompt_token_ids
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == prompt[:3]


def test_openai_fields_without_a_meaning_here_are_accepted(running) -> None:
    answer = running.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=2,
        user="someone",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=False,
        response_format={"type": "text"},
    )
    assert answer.usage.completion_tokens == 2
