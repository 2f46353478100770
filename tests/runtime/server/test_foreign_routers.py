"""What vLLM's router and llm-d's sidecar send to both engines, recorded by benchmarks/foreign_bodies.py."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.server.conftest import Running
from tests.runtime.server.test_kv_transfer import ANSWERED, TO_DECODE, cache_of

from kvasir_runtime.transfer.params import KvTransferParams

RECORDED = {
    f"{file.stem} {number}": legs
    for file in sorted((Path(__file__).parent / "foreign_routers").glob("*.json"))
    for number, legs in enumerate(json.loads(file.read_text()))
}
recorded = pytest.mark.parametrize("legs", RECORDED.values(), ids=RECORDED)


@pytest.fixture
def server(start_server) -> Iterator[Running]:
    with start_server(cache=cache_of()) as running:
        running.core.kv_transfer_params = ANSWERED
        yield running


@recorded
def test_the_prefill_leg_is_one_token_and_where_its_blocks_are(server: Running, legs: dict[str, str]) -> None:
    answer = server.http.post(legs["path"], content=legs["prefill"])
    assert (answer.status_code, answer.json()["kv_transfer_params"]) == (200, TO_DECODE), answer.text
    (received,) = server.core.received
    assert (received.spec.sampling.max_tokens, received.spec.kv_transfer_params) == (
        1,
        KvTransferParams(do_remote_decode=True),
    )


@recorded
def test_the_decode_leg_fetches_what_the_prefill_leg_answered(server: Running, legs: dict[str, str]) -> None:
    answer = server.http.post(legs["path"], content=legs["decode"])
    assert answer.status_code == 200, answer.text
    (received,) = server.core.received
    params = received.spec.kv_transfer_params
    assert params is not None
    assert (params.do_remote_prefill, params.do_remote_decode) == (True, False)
    assert (params.remote_host, params.remote_port, params.remote_key) == ("10.0.0.1", 5600, "r")
    limit = json.loads(legs["decode"]).keys() & {"max_tokens", "max_completion_tokens"}
    assert received.spec.sampling.max_tokens == (8 if limit else 16)


def test_every_router_is_there_with_streams_and_without_of_both_routes() -> None:
    seen = {
        (name.rpartition(" ")[0], legs["path"], '"stream":true' in legs["decode"]) for name, legs in RECORDED.items()
    }
    assert len(seen) == len(RECORDED) == 2 * 2 * 2
