"""Prompts of the APIs that take text or token ids."""

import json
from typing import Any

import pytest

from kvasir_router.dialects.dialect import Dialect, Prompt
from kvasir_router.dialects.text_prompts import Completions, Embeddings, Scores, Tokenize
from kvasir_router.errors import RequestError


def prompt(body: dict[str, Any], dialect: Dialect | None = None, model: str = "m") -> Prompt:
    dialect = dialect or Completions()
    found = dialect.prompt(dialect.read(json.dumps(body).encode()), model)
    assert found is not None
    return found


def token_ids(found: Prompt) -> list[int]:
    assert found.is_token_ids
    return [int.from_bytes(found.content[at : at + 4], "little") for at in range(0, len(found.content), 4)]


@pytest.mark.parametrize(
    ("given", "expected"), [([1, 2, 70_000], [1, 2, 70_000]), ([[1, 2], [3]], [1, 2, 3]), ([-1], []), ([[1], "a"], [])]
)
def test_token_ids_are_uint32_in_one_row(given: Any, expected: list[int]) -> None:
    assert token_ids(prompt({"prompt": given})) == expected


@pytest.mark.parametrize(
    ("given", "expected"), [("ä", "ä".encode()), (["a", "b"], b"a\0b"), ({}, b""), (None, b""), ([], b"")]
)
def test_text_is_utf8(given: Any, expected: bytes) -> None:
    found = prompt({"prompt": given})
    assert (found.content, found.is_token_ids) == (expected, False)


def test_an_embedding_has_its_text_as_input_and_generates_nothing() -> None:
    assert prompt({"input": "abc"}, Embeddings()).content == b"abc"
    assert Embeddings.num_output_tokens == 0


@pytest.mark.parametrize(
    "body",
    [
        {"query": "q", "documents": ["a", "b"]},
        {"text_1": "q", "text_2": ["a", "b"]},
        {"queries": "q", "items": ["a", "b"]},
    ],
)
def test_of_scores_the_query_comes_first_and_nothing_is_generated(body: dict[str, Any]) -> None:
    found = prompt(body, Scores("/v1/score"))
    assert (found.content, found.is_batch, found.is_text) == (b'"q"\n["a", "b"]', True, False)
    assert Scores.num_output_tokens == 0


def test_scores_of_nothing_prefill_nothing() -> None:
    scores = Scores("/v1/rerank")
    assert scores.prompt(scores.read(b'{"model": "m"}'), "m") is None


def test_the_same_text_of_another_api_model_or_salt_shares_nothing() -> None:
    seeds = [
        prompt({"prompt": "a"}).seed,
        prompt({"prompt": "a"}, model="other").seed,
        prompt({"prompt": "a", "cache_salt": "s"}).seed,
        prompt({"input": "a"}, Embeddings()).seed,
        prompt({"input": "a"}, Embeddings("/classify")).seed,
    ]
    assert len(set(seeds)) == len(seeds)


def test_nothing_is_prefilled_to_tokenize() -> None:
    tokenize = Tokenize()
    assert tokenize.prompt(tokenize.read(b'{"prompt": "text"}'), "m") is None


@pytest.mark.parametrize("dialect", [Completions(), Embeddings(), Scores("/x"), Tokenize()])
def test_an_error_in_a_stream_is_its_body_as_an_event(dialect: Dialect) -> None:
    error = RequestError("no")
    assert dialect.error_event(error) == b"data: " + dialect.error_body(error) + b"\n\n"
    assert json.loads(dialect.error_body(error))["error"]["message"] == "no"
