"""`kv_transfer_params` on the way between router and engine: each reads what the other writes."""

import msgspec
import pytest
from starlette.requests import Request

from kvasir_router.relay.kv_transfer import (
    Handover,
    concurrent_handover,
    decode_body,
    lookup_params,
    params_of_answer,
    prefill_body,
    sequential_handover,
    with_lookup,
)
from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.server.body import parse
from kvasir_runtime.server.protocol import ChatCompletionRequest, CompletionRequest
from kvasir_runtime.server.resolving import transfer_params
from kvasir_runtime.server.responses import Completion, to_json
from kvasir_runtime.transfer.params import KvTransferParams

PREFILL_URL = "http://10.0.0.7:8000"
PRODUCER, CONSUMER = (
    KvTransferConfig(kv_connector="NixlConnector", kv_role=role) for role in ("kv_producer", "kv_consumer")
)
BOTH = KvTransferConfig(kv_connector="NixlConnector")
FIELDS = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 500,
    "temperature": 0.5,
}
CHAT = FIELDS | {"messages": [{"role": "user", "content": "hi"}]}
BODIES: list[tuple[type[ChatCompletionRequest] | type[CompletionRequest], dict[str, object]]] = [
    (CompletionRequest, FIELDS | {"prompt": "hi", "min_tokens": 100, "best_of": 1}),
    (ChatCompletionRequest, CHAT | {"n": 1}),
    (ChatCompletionRequest, {key: CHAT[key] for key in CHAT if key != "max_tokens"} | {"max_completion_tokens": 500}),
]
routes = pytest.mark.parametrize(("model", "body"), BODIES)


def read(
    model: type[ChatCompletionRequest] | type[CompletionRequest], body: bytes, transfer: KvTransferConfig
) -> tuple[ChatCompletionRequest | CompletionRequest, KvTransferParams]:
    """As the engine's API does."""
    request = parse(model, body)
    params = transfer_params(Request({"type": "http"}), request, transfer)
    assert params is not None
    return request, params


@routes
@pytest.mark.parametrize("handover", [concurrent_handover(PREFILL_URL, 5600), sequential_handover(PREFILL_URL, 5600)])
def test_a_prefill_engine_reads_that_it_computes_one_token_and_keeps_the_blocks(
    model: type[ChatCompletionRequest] | type[CompletionRequest], body: dict[str, object], handover: Handover
) -> None:
    written = prefill_body(msgspec.json.encode(body), handover.to_prefill)
    request, params = read(model, written, PRODUCER)
    assert (request.max_tokens, request.stream, request.n) == (1, False, 1)
    assert (params.do_remote_decode, params.is_pull) == (True, False)


@routes
def test_a_decode_engine_reads_where_to_ask_for_what_the_prefill_engine_keeps(
    model: type[ChatCompletionRequest] | type[CompletionRequest], body: dict[str, object]
) -> None:
    content, handover = msgspec.json.encode(body), concurrent_handover(PREFILL_URL, 5600)
    _, prefill = read(model, prefill_body(content, handover.to_prefill), PRODUCER)
    request, decode = read(model, b"".join(decode_body(content, handover.to_decode)), CONSUMER)
    assert (decode.do_remote_prefill, decode.do_remote_decode) == (True, False)
    assert (decode.remote_host, decode.remote_port) == ("10.0.0.7", 5600)
    assert decode.remote_key == prefill.transfer_id
    assert request.model_copy(update={"kv_transfer_params": None}) == parse(model, content)


@routes
def test_an_engine_reads_which_peer_to_ask_for_what_it_has_cached(
    model: type[ChatCompletionRequest] | type[CompletionRequest], body: dict[str, object]
) -> None:
    """Without a key, which would be one under which something is kept."""
    content = msgspec.json.encode(body)
    told = lookup_params("http://10.0.0.7:8000", 5600)
    request, params = read(model, b"".join(decode_body(content, told)), BOTH)
    assert (params.is_pull, params.remote_host, params.remote_port) == (True, "10.0.0.7", 5600)
    assert (params.remote_key, params.do_remote_decode) == (None, False)
    assert request.model_copy(update={"kv_transfer_params": None}) == parse(model, content)


@routes
@pytest.mark.parametrize("handover", [concurrent_handover(PREFILL_URL, 5600), sequential_handover(PREFILL_URL, 5600)])
def test_a_prefill_engine_reads_which_peer_to_ask_beside_what_it_keeps(
    model: type[ChatCompletionRequest] | type[CompletionRequest], body: dict[str, object], handover: Handover
) -> None:
    """Its own id is no key of the peer's."""
    told = with_lookup(handover.to_prefill, "http://10.0.0.8:8000", 5601)
    _, params = read(model, prefill_body(msgspec.json.encode(body), told), BOTH)
    assert (params.do_remote_decode, params.is_pull, params.remote_key) == (True, True, None)
    assert (params.remote_host, params.remote_port) == ("10.0.0.8", 5601)
    _, alone = read(model, prefill_body(msgspec.json.encode(body), handover.to_prefill), BOTH)
    assert params.transfer_id == alone.transfer_id


def test_a_decode_engine_reads_what_a_prefill_engine_has_answered() -> None:
    """vLLM's form, one engine after the other."""
    kept = KvTransferParams(
        do_remote_prefill=True, remote_engine_id="e", remote_request_id="r", remote_block_ids=[1, 2],
        remote_host="10.0.0.7", remote_port=5600, tp_size=1, remote_num_tokens=32,
    )  # fmt: skip
    answer = to_json(Completion("id", 0, "m", [], kv_transfer_params=kept))
    content = msgspec.json.encode({"model": "m", "prompt": "hi"})
    _, params = read(CompletionRequest, b"".join(decode_body(content, params_of_answer(answer))), CONSUMER)
    assert (params.is_pull, params.remote_host, params.remote_port) == (True, "10.0.0.7", 5600)
    assert (params.remote_engine_id, params.remote_key) == ("e", "r")


def test_an_engine_that_kept_nothing_says_nothing() -> None:
    assert params_of_answer(to_json(Completion("id", 0, "m", []))) is None
