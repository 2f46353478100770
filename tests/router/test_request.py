import json
from typing import Any

import pytest

from kvasir_router.errors import MalformedRequestError
from kvasir_router.request import InferenceRequest, PromptSettings, engine_body, parse

SETTINGS = PromptSettings(block_tokens=4, bytes_per_token=4.0)
CHAT = "/v1/chat/completions"


def parsed(body: dict[str, Any], path: str = CHAT) -> InferenceRequest:
    return parse(path, json.dumps(body).encode(), SETTINGS)


def shared_blocks(one: InferenceRequest, other: InferenceRequest) -> int:
    return sum(a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=False))


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "\xff"}',
        b'{"messages": [{"content": "\xfe"}]}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="not a JSON object"):
        parse(CHAT, body, SETTINGS)


@pytest.mark.parametrize(
    "body",
    [
        {"model": 7},
        {"messages": 3},
        {"messages": [1, None]},
        {"prompt": {}},
        {"prompt": [[1], "a"]},
        {"prompt": [-1]},
        {},
    ],
)
def test_wrong_types_are_left_to_the_engine(body: dict[str, Any]) -> None:
    sent = json.dumps(body).encode()
    assert engine_body(parsed(body), sent) == sent


def resolved(body: bytes) -> InferenceRequest:
    return parse(CHAT, body, SETTINGS, lambda name: {"alias": "m"}.get(name, name))


def test_an_alias_becomes_the_models_own_name_and_every_other_value_keeps_its_bytes() -> None:
    body = b'{"a" :  1e3, "model": "alias", "n":[ 1.0 ,9007199254740993], "s":"\\u00e4\xc3\xa4"}'
    request = resolved(body)
    assert request.model == "m"
    assert engine_body(request, body) == b'{"a":1e3,"model":"m","n":[ 1.0 ,9007199254740993],"s":"\\u00e4\xc3\xa4"}'


@pytest.mark.parametrize("model", [b'"m"', b'"other"', b"7", b"null", b'["alias"]'])
def test_without_an_alias_the_body_is_the_clients_own(model: bytes) -> None:
    body = b'{ "model" : %s }' % model
    assert engine_body(resolved(body), body) is body


def test_of_a_model_named_twice_the_last_counts_here_and_for_the_engine() -> None:
    body = b'{"model":"m","model":"alias"}'
    request = resolved(body)
    assert (request.model, engine_body(request, body)) == ("m", b'{"model":"m"}')


def test_an_alias_shares_the_blocks_of_the_models_own_name() -> None:
    one, other = (resolved(json.dumps({"model": name, "prompt": "a" * 64}).encode()) for name in ("m", "alias"))
    assert one.block_hashes == other.block_hashes != ()


def test_reads_model_and_stream() -> None:
    request = parsed({"model": "m", "stream": True, "messages": turns("hi"), "unknown": {"nested": [1]}})
    assert (request.model, request.is_stream) == ("m", True)


def test_stream_counts_only_when_it_is_true() -> None:
    assert not parsed({"stream": "yes"}).is_stream


def test_token_ids_are_counted_exactly() -> None:
    assert parsed({"prompt": list(range(11))}).num_prompt_tokens == 11


def test_lists_of_token_ids_are_counted_together() -> None:
    assert parsed({"prompt": [[1, 2, 3], [4, 5]]}).num_prompt_tokens == 5


def test_text_is_counted_by_its_utf8_bytes() -> None:
    assert parsed({"prompt": "ä" * 40}).num_prompt_tokens == 20


def test_a_longer_conversation_shares_the_blocks_of_its_beginning() -> None:
    short = parsed({"model": "m", "messages": turns("a" * 100)})
    long = parsed({"model": "m", "messages": turns("a" * 100, "b" * 100)})
    assert shared_blocks(short, long) == len(short.block_hashes) > 5


def test_the_last_message_counts_not_only_the_first() -> None:
    one = parsed({"messages": turns("a" * 64, "b" * 64)})
    other = parsed({"messages": turns("a" * 64, "c" * 64)})
    assert 0 < shared_blocks(one, other) < len(one.block_hashes)


def test_key_order_and_spacing_do_not_matter() -> None:
    one = parse(CHAT, b'{"messages": [{"role": "user", "content": "0123456789"}]}', SETTINGS)
    other = parse(CHAT, b'{"messages":[{"content":"0123456789",  "role":"user"}]}', SETTINGS)
    assert one.block_hashes == other.block_hashes != ()


@pytest.mark.parametrize(
    "changed",
    [{"model": "other"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}, {"messages": turns("b" * 64)}],
)
def test_what_changes_the_prompt_or_its_cache_shares_no_block(changed: dict[str, Any]) -> None:
    body = {"model": "m", "messages": turns("a" * 64)}
    assert shared_blocks(parsed(body), parsed(body | changed)) == 0


def test_text_and_tokens_of_different_paths_share_no_block() -> None:
    body = {"prompt": "a" * 64}
    assert shared_blocks(parsed(body, "/v1/completions"), parsed(body, "/tokenize")) == 0
