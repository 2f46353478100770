"""`allowed_token_ids` and `bad_words` as clients send them, `truncate_prompt_tokens`, and `prompt_logprobs` as vLLM
answers them."""

from typing import Any

import pytest
from tests.runtime.server.test_bad_input import TEXT, post

PROMPT = "the quick brown fox"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}


def asked_of(running: Any, **fields: Any) -> Any:
    """What the core is given."""
    running.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, extra_body=fields)
    return running.core.received[-1].spec


def test_allowed_tokens_reach_the_core(running) -> None:
    assert asked_of(running, allowed_token_ids=[9, 5, 9]).sampling.allowed_token_ids == (5, 9)
    assert asked_of(running, allowed_token_ids=None).sampling.allowed_token_ids is None


def test_a_word_is_ruled_out_as_it_is_written_alone_and_behind_a_space(running) -> None:
    spellings = {tuple(running.tokenizer.encode(text, add_special_tokens=False).ids) for text in ("fox", " fox")}
    assert len(spellings) == 2
    assert set(asked_of(running, bad_words=[" fox"]).sampling.bad_words) == spellings
    assert asked_of(running, bad_words=[]).sampling.bad_words == ()


def test_both_rules_are_taken_of_chats_too(running) -> None:
    running.http.post("/v1/chat/completions", json=CHAT | {"allowed_token_ids": [5, 6, 7], "bad_words": ["fox"]})
    sampling = running.core.received[-1].spec.sampling
    assert (sampling.allowed_token_ids, len(sampling.bad_words)) == ((5, 6, 7), 2)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
    ({"allowed_token_ids": [5, 10**6]}, "allowed_token_ids", "token id 1000000 is not in the vocabulary"),
    ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids", "nothing may be left"),
    ({"bad_words": ["a", " \n"]}, "bad_words", "bad_words[1]: it is nothing but white space"),
    ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
    ({"bad_words": ["a"] * 257}, "bad_words", "at most 256 items"),
    ({"bad_words": ["a z" * 40]}, "bad_words", "at most 32 are looked for"),
    ({"bad_words": "a"}, "bad_words", "valid array"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves nothing"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "the model's context is 512 tokens"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20 (--max-logprobs)"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: false"),
    ({"logits_processors": ["a.b.C"]}, "logits_processors", "does not support it"),
]


@pytest.mark.parametrize(("wrong", "param", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(running, wrong, param, message) -> None:
    status, error = post(running, "/v1/completions", TEXT | wrong)
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert running.core.received == []


def test_a_word_may_not_be_all_that_is_allowed(running) -> None:
    [token] = running.tokenizer.encode("a", add_special_tokens=False).ids
    status, error = post(running, "/v1/completions", TEXT | {"allowed_token_ids": [token], "bad_words": ["a"]})
    assert (status, error["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize(("most", "num_read"), [(2, 2), (512, 3), (-1, 3), (None, 3)])
def test_the_last_tokens_of_a_prompt_are_read(running, most: int | None, num_read: int) -> None:
    fields = {"truncate_prompt_tokens": most, "max_tokens": 1}
    token_ids = running.tokenizer.encode("the quick", add_special_tokens=False).ids[:3]
    for prompt in (token_ids, running.tokenizer.decode(token_ids)):
        running.client.completions.create(model="tiny", prompt=prompt, extra_body=fields)
        assert running.core.received[-1].spec.prompt_token_ids == token_ids[-num_read:]


def test_a_prompt_of_any_length_is_cut_to_what_there_is_room_for(running) -> None:
    for prompt in ([5] * 2000, "ab " * 2_000):
        fields = {"truncate_prompt_tokens": -1}
        running.client.completions.create(model="tiny", prompt=prompt, max_tokens=12, extra_body=fields)
        assert running.core.received[-1].spec.num_prompt_tokens == 500
    message = {"role": "user", "content": "ab " * 2_000}
    running.http.post("/v1/chat/completions", json=CHAT | {"messages": [message], "truncate_prompt_tokens": -1})
    assert running.core.received[-1].spec.num_prompt_tokens == 509


def test_what_is_read_is_what_is_echoed(running) -> None:
    fields = {"truncate_prompt_tokens": 2}
    [choice] = running.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0, extra_body=fields
    ).choices
    assert choice.text == running.tokenizer.decode(running.tokenizer.encode(PROMPT).ids[-2:])
    assert len(choice.logprobs.tokens) == 2


def check_scores(running: Any, scores: list[Any], token_ids: list[int], most: int) -> None:
    assert scores[0] is None
    assert len(scores) == len(token_ids)
    for token_id, entry in zip(token_ids[1:], scores[1:], strict=True):
        assert next(iter(entry)) == str(token_id)
        assert len(entry) == len({token_id, *range(most)})  # the fake core's most likely ones
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert all(each["rank"] == int(other) + 1 for other, each in list(entry.items())[1:])


@pytest.mark.parametrize("most", [0, 2])
def test_a_prompts_log_probabilities_have_vllms_shape(running, most: int) -> None:
    token_ids = running.tokenizer.encode(PROMPT).ids
    body = TEXT | {"prompt": token_ids, "prompt_logprobs": most, "n": 2}
    for choice in running.http.post("/v1/completions", json=body).json()["choices"]:
        check_scores(running, choice["prompt_logprobs"], token_ids, most)
        assert choice["logprobs"] is None
    answer = running.http.post(
        "/v1/chat/completions", json=CHAT | {"prompt_logprobs": most, "return_token_ids": True}
    ).json()
    check_scores(running, answer["prompt_logprobs"], answer["prompt_token_ids"], most)
    assert "prompt_logprobs" not in running.http.post("/v1/chat/completions", json=CHAT).json()


def test_an_echo_has_as_many_alternatives_as_it_asks_for(running) -> None:
    fields = {"prompt_logprobs": 5}
    [choice] = running.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, extra_body=fields
    ).choices
    assert {len(entry) for entry in choice.logprobs.top_logprobs[1:]} <= {1, 2}
    assert {len(entry) for entry in choice.prompt_logprobs[1:]} == {6}


def test_not_all_scores_there_could_be_are_answered(running) -> None:
    prompts = [[5] * 500] * 500
    status, error = post(running, "/v1/completions", TEXT | {"prompt": prompts, "prompt_logprobs": 20})
    assert (status, error["param"]) == (400, "prompt_logprobs")
