"""What is written into the bodies of a request that two engines serve, and what clients may not write there."""

import json
from typing import Any

import pytest

from kvasir_router.dialects.chat import Chat
from kvasir_router.errors import KvTransferParamsError
from kvasir_router.relay.kv_transfer import (
    concurrent_handover,
    decode_body,
    params_of_answer,
    prefill_body,
    sequential_handover,
    without_clients_params,
)
from kvasir_router.request import read_fields

PARAMS = b'{"transfer_id":"a"}'


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"{ }\n",
        b'{"model":"m"}',
        b' {"model" : "m" } \r\n',
        b'{"a":{}}',
        b'{"a":"}"}',
        b'{"a":[{"b":1}]}\t',
        b'{"price":1.10,"big":12345678901234567890,"text":"\\u00e9\xc3\xa9"}',
    ],
)
def test_the_decode_body_is_the_clients_bytes_with_one_member_more(body: bytes) -> None:
    pieces = decode_body(body, PARAMS)
    written = b"".join(pieces)
    assert json.loads(written) == json.loads(body) | {"kv_transfer_params": {"transfer_id": "a"}}
    assert body.startswith(pieces[0])
    assert len(written) <= len(body) + len(PARAMS) + len(b',"kv_transfer_params":')


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "m", "prompt": "p"}, {"model": "m", "prompt": "p"}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {}),
        ({"max_tokens": 500, "min_tokens": 100, "best_of": 1, "n": 1}, {}),
        ({"max_completion_tokens": 500, "seed": 3}, {"max_completion_tokens": 1, "seed": 3}),
        ({"kv_transfer_params": None, "temperature": 0.5}, {"temperature": 0.5}),
    ],
)
def test_the_prefill_body_asks_for_one_token_and_no_stream(body: dict[str, Any], expected: dict[str, Any]) -> None:
    written = json.loads(prefill_body(json.dumps(body).encode(), PARAMS))
    one_token = {"max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": {"transfer_id": "a"}}
    assert written == expected | one_token


def test_values_of_the_prefill_body_keep_their_own_bytes() -> None:
    assert b'"price":1.10' in prefill_body(b'{ "price" : 1.10, "max_tokens": 7 }', PARAMS)


def test_both_engines_are_given_one_id_at_once() -> None:
    handover = concurrent_handover("http://10.0.0.7:8000", 5600)
    assert handover.to_decode is not None
    prefill, decode = json.loads(handover.to_prefill), json.loads(handover.to_decode)
    transfer_id = prefill.pop("transfer_id")
    assert prefill == {"do_remote_decode": True, "do_remote_prefill": False}
    assert decode == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.7", "remote_port": 5600,
        "transfer_id": transfer_id,
    }  # fmt: skip
    assert len(bytes.fromhex(transfer_id)) == 16


def test_no_two_transfers_share_an_id() -> None:
    assert len({concurrent_handover("http://p:8000", 5600).to_prefill for _ in range(100)}) == 100


def test_a_prefill_engine_by_ipv6_is_named_as_sockets_do() -> None:
    to_decode = concurrent_handover("http://[fd00::7]:8000", 5600).to_decode
    assert to_decode is not None
    assert json.loads(to_decode)["remote_host"] == "fd00::7"


def test_vllms_prefill_engine_is_asked_first_and_says_where_the_blocks_are() -> None:
    handover = sequential_handover("http://p:8000", 5600)
    params = json.loads(handover.to_prefill)
    assert handover.to_decode is None
    assert params.pop("do_remote_decode") is True
    assert params.pop("do_remote_prefill") is False
    assert set(params.values()) == {None}
    assert params_of_answer(b'{"id":"x","kv_transfer_params": {"remote_port":1} }') == b'{"remote_port":1}'


@pytest.mark.parametrize("answer", [b'{"id":"x"}', b'{"kv_transfer_params":null}', b"", b"[]", b"\xff", b"no json"])
def test_an_answer_that_does_not_say_so_has_no_params(answer: bytes) -> None:
    assert params_of_answer(answer) is None


@pytest.mark.parametrize("params", [{"transfer_id": "mine"}, {}, 0, "x", False])
def test_a_client_may_not_say_where_kv_is(params: Any) -> None:
    body = json.dumps({"model": "m", "kv_transfer_params": params}).encode()
    with pytest.raises(KvTransferParamsError, match="leave it out"):
        without_clients_params(read_fields(Chat(), body), body)


def test_null_of_a_client_is_left_out_and_every_other_body_stays() -> None:
    body = b'{"kv_transfer_params": null, "seed": 1.0}'
    assert without_clients_params(read_fields(Chat(), body), body) == b'{"seed":1.0}'
    other = b'{"seed": 1.0}'
    assert without_clients_params(read_fields(Chat(), other), other) is other
