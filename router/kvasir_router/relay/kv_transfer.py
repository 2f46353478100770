"""How the two legs of a request are told of each other: `kv_transfer_params`, vLLM's field in both bodies.

`kvasir`: both at once. Both are given the same id, which nobody can guess; the decode engine asks for its blocks at the
prefill engine's side channel and gets them while they are computed. `vllm`: one after the other. The prefill engine's
answer says where its blocks are, and is passed on to the decode engine.

Whoever prefills, for itself or for another, may be told to fetch a cached prefix from a peer: the place, without an id
of what that keeps.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvasir_router.config import KvTransferProtocolName
from kvasir_router.dialects.dialect import ABSENT, RoutingFields, body_of, members_of, with_member
from kvasir_router.errors import KvTransferParamsError
from kvasir_router.relay.upstream_pool import Origin

FIELD = "kv_transfer_params"
_NULL = msgspec.Raw(b"null")
# Of the prefill leg: it draws one token, which is thrown away. What asks for more than one answer, or for none below a
# length, would be refused; usage in a stream is refused where there is none.
_ONE_TOKEN = {
    "stream": msgspec.Raw(b"false"),
    "max_tokens": msgspec.Raw(b"1"),
    "n": msgspec.Raw(b"1"),
}
_LEFT_OUT = ("stream_options", "min_tokens", "best_of", FIELD)


@dataclass(frozen=True, slots=True)
class Handover:
    """The field's value for each leg; `to_decode` None: the prefill engine's answer will tell."""

    to_prefill: bytes
    to_decode: bytes | None


NewHandover = Callable[[str, int], Handover]
"""(prefill engine's URL, port of its side channel)"""


def concurrent_handover(prefill_url: str, port: int) -> Handover:
    transfer = {"transfer_id": secrets.token_hex(16)}
    prefill = {"do_remote_decode": True, "do_remote_prefill": False}
    decode = {"do_remote_prefill": True, "do_remote_decode": False}
    return Handover(_json(prefill | transfer), _json(decode | _place(prefill_url, port) | transfer))


def sequential_handover(prefill_url: str, port: int) -> Handover:
    """As vLLM's routers begin: all that the answer will tell is null."""
    to_prefill = {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip
    return Handover(_json(to_prefill), None)


HANDOVERS: Mapping[KvTransferProtocolName, NewHandover] = {"kvasir": concurrent_handover, "vllm": sequential_handover}


def lookup_params(peer_url: str, port: int) -> bytes:
    """For an engine that is to fetch what a peer has cached of the prompt."""
    return _json({"do_remote_prefill": True, "do_remote_decode": False} | _place(peer_url, port))


def with_lookup(params: bytes, peer_url: str, port: int) -> bytes:
    """A prefill leg's, which fetches what a peer has cached before it computes the rest."""
    return _json(msgspec.json.decode(params) | {"do_remote_prefill": True} | _place(peer_url, port))


def params_of_answer(answer: bytes) -> bytes | None:
    """Where the prefill engine says its blocks are; None where it does not."""
    try:
        params = members_of(answer).get(FIELD, _NULL)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return None if bytes(params) == b"null" else bytes(params)


def prefill_body(body: bytes, params: bytes) -> bytes:
    """The client's, cut down to one token; every other value keeps its own bytes."""
    members = members_of(body)
    for name in _LEFT_OUT:
        members.pop(name, None)
    if "max_completion_tokens" in members:
        members["max_completion_tokens"] = msgspec.Raw(b"1")
    return body_of(members | _ONE_TOKEN | {FIELD: msgspec.Raw(params)})


def decode_body(body: bytes, params: bytes) -> tuple[bytes, ...]:
    """The client's with the field, in pieces."""
    return with_member(body, FIELD, params)


def without_clients_params(fields: RoutingFields, body: bytes) -> bytes:
    """Null says nothing, and is left out; of a large body, which no other engine prefills, it stays. Raises
    KvTransferParamsError (400) for anything else.
    """
    if fields.kv_transfer_params is ABSENT:
        return body
    if bytes(fields.kv_transfer_params) != b"null":
        raise KvTransferParamsError(
            f"{FIELD} is this router's to write: it chooses whose KV is used; leave it out", param=FIELD
        )
    if fields.is_large:
        return body
    members = members_of(body)
    del members[FIELD]
    return body_of(members)


def _place(url: str, port: int) -> dict[str, Any]:
    return {"remote_host": Origin.parse(url).host, "remote_port": port}


def _json(params: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(params)
