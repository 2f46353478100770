import json
from typing import Any

import pytest

from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import Dialect
from kvasir_router.dialects.messages import Messages
from kvasir_router.dialects.responses import Responses
from kvasir_router.dialects.text_prompts import Completions, Embeddings, Tokenize
from kvasir_router.errors import MalformedRequestError
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex, BlockHashes
from kvasir_router.request import Envelope, InferenceRequest, engine_body, model_of, parse, read_fields

pytestmark = pytest.mark.anyio
INDEX = ApproximatePrefixIndex(100, 10.0, block_tokens=4, bytes_per_token=4.0)
CHAT = Chat()


async def parsed_bytes(
    body: bytes, dialect: Dialect = CHAT, headers: dict[bytes, bytes] | None = None
) -> InferenceRequest:
    """`alias` is another name of m."""
    envelope = Envelope("id", tuple((headers or {}).items()), "tenant", dialect)
    fields = read_fields(dialect, body)
    return await parse(envelope, fields, lambda name: {"alias": "m"}.get(name, name), INDEX)


async def parsed(body: dict[str, Any], dialect: Dialect = CHAT, **options: Any) -> InferenceRequest:
    return await parsed_bytes(json.dumps(body).encode(), dialect, **options)


def hashes(request: InferenceRequest) -> tuple[int, ...]:
    assert isinstance(request.prefix, BlockHashes)
    return request.prefix.hashes


def shared_blocks(one: InferenceRequest, other: InferenceRequest) -> int:
    return sum(a == b for a, b in zip(hashes(one), hashes(other), strict=False))


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
        b'{"messages": [{"content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
    ],
)
async def test_a_body_that_is_no_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequestError, match="not a JSON object"):
        await parsed_bytes(body)


@pytest.mark.parametrize("dialect", [CHAT, Completions()])
@pytest.mark.parametrize(
    "body",
    [
        {"model": 7},
        {"messages": 3},
        {"messages": [1, None]},
        {"messages": [{"content": [7, None, {"text": 1}]}]},
        {"prompt": {}},
        {"prompt": [[1], "a"]},
        {"prompt": [-1]},
        {"prompt": None},
        {"priority": "high"},
        {"user": 7},
        {},
    ],
)
async def test_wrong_types_are_left_to_the_engine(body: dict[str, Any], dialect: Dialect) -> None:
    sent = json.dumps(body).encode()
    assert engine_body(await parsed_bytes(sent, dialect), sent) == sent


async def test_an_alias_becomes_the_models_own_name_and_every_other_value_keeps_its_bytes() -> None:
    body = b'{"a" :  1e3, "model": "alias", "n":[ 1.0 ,9007199254740993], "s":"\\u00e4\xc3\xa4"}'
    request = await parsed_bytes(body)
    assert request.model == "m"
    assert engine_body(request, body) == b'{"a":1e3,"model":"m","n":[ 1.0 ,9007199254740993],"s":"\\u00e4\xc3\xa4"}'


@pytest.mark.parametrize("model", [b'"m"', b'"other"', b"7", b"null", b'["alias"]'])
async def test_without_an_alias_the_body_is_the_clients_own(model: bytes) -> None:
    body = b'{ "model" : %s }' % model
    assert engine_body(await parsed_bytes(body), body) is body


async def test_of_a_model_named_twice_the_last_counts_here_and_for_the_engine() -> None:
    body = b'{"model":"m","model":"alias"}'
    request = await parsed_bytes(body)
    assert model_of(read_fields(CHAT, body)) == "alias"
    assert (request.model, engine_body(request, body)) == ("m", b'{"model":"m"}')


async def test_an_alias_shares_the_blocks_of_the_models_own_name() -> None:
    one, other = [await parsed({"model": name, "prompt": "a" * 64}, Completions()) for name in ("m", "alias")]
    assert hashes(one) == hashes(other) != ()


async def test_reads_what_routing_needs() -> None:
    body = {"model": "m", "stream": True, "priority": -3, "messages": turns("hi"), "unknown": {"nested": [1]}}
    request = await parsed(body)
    assert (request.model, request.is_stream, request.priority) == ("m", True, -3)
    assert (request.request_id, request.tenant) == ("id", "tenant")


@pytest.mark.parametrize("stream", ["yes", 1, None, False])
async def test_stream_counts_only_when_it_is_true(stream: Any) -> None:
    assert not (await parsed({"stream": stream})).is_stream


@pytest.mark.parametrize("priority", ["1", 1.5, True, None])
async def test_a_priority_that_is_no_integer_is_none(priority: Any) -> None:
    assert (await parsed({"priority": priority})).priority == 0


async def test_a_stream_can_be_resumed_where_its_end_can_be_told() -> None:
    assert (await parsed({"stream": True})).is_resumable
    assert not (await parsed({"stream": True}, Tokenize())).is_resumable
    assert not (await parsed({})).is_resumable


async def test_a_request_holds_its_prompt_and_what_it_is_expected_to_generate() -> None:
    request = await parsed({"prompt": list(range(11))}, Completions())
    assert (request.num_prompt_tokens, request.num_output_tokens) == (11, 256)


async def test_what_needs_no_prefill_costs_nothing() -> None:
    request = await parsed({"prompt": "a" * 64}, Tokenize())
    assert (request.prefix, request.num_prompt_tokens, request.num_output_tokens) == (None, 0, 0)


async def test_a_session_is_what_the_client_calls_it() -> None:
    body, header = {"user": "u", "messages": turns("hello")}, {b"x-session-id": b"s"}
    assert (await parsed(body, headers=header)).session == "s"
    assert (await parsed(body)).session == "u"


async def test_a_session_without_a_name_is_one_that_begins_alike() -> None:
    beginning = "a" * 2000
    sessions = [(await parsed({"messages": turns(*texts)})).session for texts in ((beginning,), (beginning, "b"))]
    assert sessions[0] == sessions[1] is not None
    assert (await parsed({"messages": turns("other")})).session != sessions[0]
    assert (await parsed({})).session is None


async def test_a_longer_conversation_shares_the_blocks_of_its_beginning() -> None:
    short = await parsed({"model": "m", "messages": turns("a" * 100)})
    long = await parsed({"model": "m", "messages": turns("a" * 100, "b" * 100)})
    assert shared_blocks(short, long) == len(hashes(short)) > 5


async def test_the_last_message_counts_not_only_the_first() -> None:
    one = await parsed({"messages": turns("a" * 64, "b" * 64)})
    other = await parsed({"messages": turns("a" * 64, "c" * 64)})
    assert 0 < shared_blocks(one, other) < len(hashes(one))


@pytest.mark.parametrize(
    "changed",
    [{"model": "other"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}, {"messages": turns("b" * 64)}],
)
async def test_what_changes_the_prompt_or_its_cache_shares_no_block(changed: dict[str, Any]) -> None:
    body = {"model": "m", "messages": turns("a" * 64)}
    assert shared_blocks(await parsed(body), await parsed(body | changed)) == 0


@pytest.mark.parametrize(
    ("dialect", "body", "can_transfer"),
    [
        (CHAT, {"messages": turns("hi")}, True),
        (CHAT, {"messages": turns("hi"), "n": 1, "best_of": None}, True),
        (CHAT, {"messages": turns("hi"), "n": 2}, False),
        (CHAT, {"messages": turns("hi"), "prompt_logprobs": 0}, False),
        (CHAT, {}, False),
        (Completions(), {"prompt": "hi"}, True),
        (Completions(), {"prompt": [1, 2]}, True),
        (Completions(), {"prompt": ["one", "two"]}, False),
        (Completions(), {"prompt": [[1, 2]]}, False),
        (Completions(), {"prompt": "hi", "best_of": 3}, False),
        (Completions(), {"prompt": "hi", "echo": True}, False),
        (Embeddings(), {"input": "hi"}, False),
        (Tokenize(), {"prompt": "hi"}, False),
        (Messages(), {"messages": turns("hi")}, True),
        (Responses(), {"input": "hi"}, True),
        (Responses(), {"input": "hi", "previous_response_id": f"resp_{'0' * 40}"}, False),
    ],
)
async def test_kv_is_handed_over_for_one_prompt_and_one_answer(
    dialect: Dialect, body: dict[str, Any], can_transfer: bool
) -> None:
    assert (await parsed({"model": "m", **body}, dialect)).can_transfer_kv is can_transfer


@pytest.mark.parametrize(("held", "is_resumable"), [(None, True), (f"resp_{'0' * 40}", False)])
async def test_what_only_one_engine_can_go_on_from_is_not_resumed_elsewhere(
    held: str | None, is_resumable: bool
) -> None:
    body = {"input": "hi", "stream": True, "previous_response_id": held}
    assert (await parsed(body, Responses())).is_resumable is is_resumable
