"""Bodies whose values would take many times their bytes as objects: routed by their raw bytes, relayed as they are."""

import io
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.router.prefix_index.test_mixed import Parts
from tests.router.prefix_index.test_tokens import card

from kvasir_router import request
from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import (
    MAX_ELEMENTS,
    SLICE_BYTES,
    BoundedDecoder,
    Dialect,
    Prompt,
    RoutingFields,
    is_too_much,
)
from kvasir_router.dialects.messages import Messages
from kvasir_router.dialects.responses import Responses
from kvasir_router.dialects.text_prompts import Completions, Embeddings, Tokenize
from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer
from kvasir_router.relay.kv_transfer import without_clients_params

pytestmark = pytest.mark.anyio
NUM_BYTES = 8 * 2**20
DEEP = b'{"a":{"b":{"c":[0]}}}'
ESCAPED = rb'{"content":"","role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[%b]"}}]}'


def many(value: bytes, num_bytes: int = NUM_BYTES) -> bytes:
    return b"[" + b",".join([value] * (num_bytes // (len(value) + 1))) + b"]"


def prompt(dialect: Dialect, body: bytes) -> Prompt:
    found = dialect.prompt(dialect.read(body), "m")
    assert found is not None
    return found


@pytest.fixture
async def index() -> AsyncIterator[Any]:
    """That renders and tokenises what it can."""
    parts = Parts()
    parts.index.use_tokenizer(PromptTokenizer(card(), PieceCache(2**20)))
    yield parts.index
    parts.threads.close()


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Completions(), b'{"prompt":%b}' % many(b"1")),
        (Completions(), b'{"prompt":%b}' % many(b"{}")),
        (Completions(), b'{"prompt":%b}' % many(b"[]")),
        (Completions(), b'{"prompt":[1],"cache_salt":%b}' % many(b"{}")),
        (Completions(), b'{"prompt":[1],"user":%b}' % many(b"{}")),
        (Embeddings(), b'{"input":%b}' % many(b'""')),
        (Chat(), b'{"messages":%b}' % many(b"1")),
        (Chat(), b'{"messages":%b}' % many(b"{}")),
        (Chat(), b'{"messages":%b}' % many(DEEP)),
        (Chat(), b'{"messages":[],"tools":%b}' % many(b"{}")),
        (Chat(), b'{"messages":[{"role":"user","content":"hi"}],"documents":%b}' % many(b"{}")),
        (Chat(), b'{"messages":[%b]}' % (ESCAPED % many(rb"\u007b\u007d")[1:-1].replace(b",", rb"\u002c"))),
        (Tokenize(), b'{"model":%b}' % many(b"{}")),
        (Messages(), b'{"messages":%b}' % many(b"{}")),
        (Messages(), b'{"messages":[{"role":"user","content":"hi"}],"system":%b}' % many(b"{}")),
        (Messages(), b'{"messages":[{"role":"user","content":"hi"}],"output_config":%b}' % many(b"{}")),
        (Responses(), b'{"input":%b}' % many(b"{}")),
        (Responses(), b'{"input":"hi","tools":%b}' % many(b"{}")),
        (Responses(), b'{"input":"hi","reasoning":%b}' % many(b"{}")),
    ],
)
async def test_a_body_of_many_values_costs_a_few_times_its_bytes(dialect: Dialect, body: bytes, index: Any) -> None:
    envelope = request.Envelope("id", (), None, dialect)
    tracemalloc.start()
    try:
        await request.parse(envelope, request.read_fields(dialect, body), lambda name: name, index)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)


async def parsed(body: bytes, index: Any) -> request.InferenceRequest:
    envelope = request.Envelope("id", (), None, Chat())
    return await request.parse(envelope, request.read_fields(Chat(), body), lambda name: name.upper(), index)


async def test_a_body_of_many_members_is_given_the_models_own_name_for_a_few_times_its_bytes(index: Any) -> None:
    members = b",".join(b'"%x":0' % number for number in range(NUM_BYTES // 10))
    body = b'{"model":"m",%b} ' % members
    asked = await parsed(body, index)
    tracemalloc.start()
    try:
        written = request.engine_body(asked, body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)
    assert written == body[:-2] + b',"model":"M"}'


@pytest.mark.parametrize("num_ids", [MAX_ELEMENTS - 10, MAX_ELEMENTS])
async def test_a_body_of_many_values_is_prefilled_where_it_is_decoded(num_ids: int, index: Any) -> None:
    """For another engine all its members would be written anew; null, which says nothing, may stay then."""
    body = b'{"messages":[{"content":[%b]}],"kv_transfer_params":null}' % b",".join([b"1"] * num_ids)
    is_small = num_ids < MAX_ELEMENTS
    assert (await parsed(body, index)).can_transfer_kv == is_small
    written = without_clients_params(request.read_fields(Chat(), body), body)
    assert (b"kv_transfer_params" not in written) == is_small


@pytest.mark.parametrize("num_ids", [MAX_ELEMENTS - 1, MAX_ELEMENTS])
def test_token_ids_are_read_up_to_the_bound(num_ids: int) -> None:
    found = prompt(Completions(), b'{"prompt":[%b]}' % b",".join([b"1000"] * num_ids))
    is_read = num_ids < MAX_ELEMENTS  # the list is an element too
    assert (found.is_token_ids, len(found.content)) == (is_read, num_ids * (4 if is_read else 5) + (not is_read))


def test_pieces_count_together() -> None:
    half = b"[" + b"10," * (MAX_ELEMENTS // 2 - 2) + b"10]"
    assert not is_too_much(half, half)
    assert is_too_much(half, half[:-1] + b",10]")


def test_text_is_read_however_many_commas_it_has() -> None:
    text = b"a, " * MAX_ELEMENTS
    found = prompt(Completions(), b'{"prompt":"%b"}' % text)
    assert (found.content, found.is_text) == (text, True)


def test_an_image_is_no_text_however_large_it_is() -> None:
    image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % (b"A" * NUM_BYTES)
    found = prompt(Chat(), b'{"messages":[{"role":"user","content":[%b]}]}' % image)
    assert len(found.content) < 100


@pytest.mark.parametrize(("given", "is_batch"), [(many(b"1"), False), (many(b"[1]"), True), (many(b'"a"'), True)])
def test_of_what_is_not_read_a_batch_is_told_all_the_same(given: bytes, is_batch: bool) -> None:
    assert prompt(Completions(), b'{"prompt":%b}' % given).is_batch == is_batch


def test_conversations_that_are_not_read_share_what_they_begin_with() -> None:
    messages = many(b'{"role":"user","content":"hi"}')
    one, other = (prompt(Chat(), b'{"messages":%b%b]}' % (messages[:-1], more)).content for more in (b"", b",{}"))
    assert other.startswith(one[:-1])


def test_short_fields_are_read_beside_what_is_too_much() -> None:
    body = b'{"model":"m","stream":true,"user":%b,"n":2,"cache_salt":"s","other":{}}' % many(b"{}")
    fields = BoundedDecoder(RoutingFields).decode(body)
    assert (fields.model, fields.stream, fields.priority, fields.n) == ("m", True, 0, 2)
    assert (bytes(fields.cache_salt), isinstance(fields.user, msgspec.Raw)) == (b'"s"', True)


@pytest.mark.parametrize("value", [b"1", b"{}"])
async def test_a_body_of_many_values_is_relayed_as_it_is(
    value: bytes, engine: Any, start_router: Any, client: Any
) -> None:
    router = await start_router(engine)
    body = b'{"model":"tiny","messages":%b}' % many(value, 2**22)
    async with client.post(router.url + "/v1/chat/completions", data=io.BytesIO(body)) as response:
        assert response.status == 200
    assert engine.bodies == [body]


@pytest.mark.parametrize("shift", range(-4, 2))
def test_what_lies_across_two_slices_counts_once(shift: int) -> None:
    before = b"x" * (SLICE_BYTES + shift) + rb"\u005b"
    assert [is_too_much(before + b"," * (MAX_ELEMENTS - more)) for more in (2, 1)] == [False, True]
