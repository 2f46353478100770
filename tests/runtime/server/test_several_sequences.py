"""n, best_of and beam search: how many sequences the core is asked for, and which of them the client gets."""

import json

import pytest

from kvasir_runtime.requests.sampling_params import BeamSearch

PROMPT = "the quick brown fox"
BEAM = {"use_beam_search": True, "max_tokens": 3}


def test_best_of_gives_the_likeliest_per_token_first(running) -> None:
    body = {"prompt": [PROMPT, "lazy dog"], "max_tokens": 2, "n": 2, "best_of": 3, "logprobs": 0}
    answer = running.http.post("/v1/completions", json=body).json()
    assert [len(request.sequences) for request in running.core.received] == [3, 3]
    shown = [(choice["index"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert shown == [(0, [-0.25] * 2), (1, [-0.375] * 2), (2, [-0.25] * 2), (3, [-0.375] * 2)]
    assert answer["usage"]["completion_tokens"] == 12, "all candidates are paid for, as OpenAI has it"


def test_candidates_are_ranked_although_no_log_probabilities_are_shown(running) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "best_of": 2}
    answer = running.http.post("/v1/chat/completions", json=body).json()
    assert running.core.received[0].spec.sampling.logprobs == 0
    assert [choice["logprobs"] for choice in answer["choices"]] == [None]


def test_a_stream_takes_best_of_where_all_are_returned(running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "n": 2, "best_of": 2, "stream": True}
    assert running.http.post("/v1/completions", json=body).status_code == 200
    assert [len(request.sequences) for request in running.core.received] == [2]


@pytest.mark.parametrize(
    ("fields", "num_sequences", "beam"),
    [
        ({"n": 2}, 2, BeamSearch(width=2)),
        ({"best_of": 4}, 1, BeamSearch(width=4)),
        ({"n": 3, "best_of": 5, "length_penalty": 0.5}, 3, BeamSearch(width=5, length_penalty=0.5)),
        ({"length_penalty": -10}, 1, BeamSearch(width=1, length_penalty=-10.0)),
        ({"length_penalty": 10}, 1, BeamSearch(width=1, length_penalty=10.0)),
        (
            {"n": 2, "early_stopping": True, "length_penalty": 0.0},
            2,
            BeamSearch(width=2, length_penalty=0.0, early_stopping=True),
        ),
        ({"n": 2, "early_stopping": False}, 2, BeamSearch(width=2, early_stopping=False)),
        ({"n": 2, "early_stopping": "never"}, 2, BeamSearch(width=2, early_stopping="never")),
    ],
)
def test_a_beam_is_as_wide_as_best_of_and_gives_n(running, fields, num_sequences: int, beam: BeamSearch) -> None:
    answers = [
        running.http.post("/v1/completions", json={"prompt": PROMPT} | BEAM | fields).json(),
        running.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]} | BEAM | fields
        ).json(),
    ]
    assert [len(answer["choices"]) for answer in answers] == [num_sequences] * 2
    assert [request.spec.beam for request in running.core.received] == [beam] * 2
    assert [len(request.sequences) for request in running.core.received] == [num_sequences] * 2


def test_what_shapes_draws_means_nothing_to_a_beam(running) -> None:
    draws = {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.5}
    running.http.post("/v1/completions", json={"prompt": PROMPT, "repetition_penalty": 1.5} | BEAM | draws)
    sampling = running.core.received[0].spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, None, 0.0)
    assert sampling.repetition_penalty == 1.5


def test_a_stream_of_beams_comes_whole_at_its_end_and_without_a_journal(running) -> None:
    body = {"prompt": PROMPT, "n": 2, "stream": True} | BEAM
    response = running.http.post("/v1/completions", json=body, headers={"x-kvasir-resumable": "1"})
    blocks = response.content.split(b"\n\n")
    events = [json.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]
    text = running.tokenizer.decode(running.tokenizer.encode(PROMPT).ids[:3])
    choices = [choice for event in events for choice in event["choices"]]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (0, text, "length"),
        (1, text, "length"),
    ]
    assert "x-kvasir-resumable" not in response.headers


def test_a_beam_search_is_not_continued(running) -> None:
    body = json.dumps({"prompt": PROMPT, "stream": True} | BEAM).encode()
    beginning = {"request_id": "a", "created": 1, "seeds": [1], "model": running.model_digest}
    journal = json.dumps(beginning).encode() + b"\n[0,[5]]\n"
    response = running.http.post(
        "/v1/completions", content=body + journal, headers={"x-kvasir-journal-at": str(len(body))}
    )
    assert (response.status_code, "cannot be continued" in response.text) == (400, True)
