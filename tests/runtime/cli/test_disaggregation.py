"""Two `serve` processes over a trained model: one computes prompts on two ranks, the other goes on from their KV, moved
by NIXL, on one, or on as many pipeline stages."""

import concurrent.futures
import json
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.runtime.cli.conftest import Server

from kvasir_runtime.server.middleware import SECRET_HEADER
from kvasir_runtime.service_secret import SECRET_VARIABLE

MODEL = Path("examples/models/kvasir-python-700k")
TEXT = Path("runtime/kvasir_runtime/scheduling/planner.py").read_text()
SECRET = "s3cret"
FOREIGN = [
    legs
    for file in sorted(Path("tests/runtime/server/foreign_routers").glob("*.json"))
    for legs in json.loads(file.read_text())
]
"""What routers of other makes were seen to send (benchmarks/foreign_bodies.py)."""
COMPLETION = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((("--pipeline-parallel-size", "2"),) * 2, id="stages"),
        pytest.param((("--tensor-parallel-size", "2"), ()), id="tensor ranks", marks=pytest.mark.slow),
    ],
)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """They know each other by a secret, as in a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, SECRET)
        servers = [start(role, *flags) for role, flags in zip(("kv_producer", "kv_both"), request.param, strict=True)]
    try:
        yield servers[0].wait_ready(), servers[1].wait_ready()
    finally:
        for server in servers:
            server.process.kill()
            server.end()


def start(role: str, *flags: str) -> Server:
    extra = {"side_channel_host": "127.0.0.1", "side_channel_port": 0, "lease_seconds": 5}
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return Server(
        MODEL, "--kv-transfer-config", json.dumps(config), "--dtype", "float32", "--max-num-seqs", "16",
        "--max-num-batched-tokens", "64", "--kv-transfer-trust-clients", *flags,
    )  # fmt: skip


def post(server: Server, body: dict) -> dict:
    """As the router does."""
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={SECRET_HEADER: SECRET}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(number: int) -> dict:
    return COMPLETION | {"prompt": TEXT[200 * number : 200 * number + 900]}


def leg(number: int, **params: object) -> dict:
    return prompt_of(number) | {"kv_transfer_params": params}


def total(server: Server, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def tokens(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def prefill_leg(server: Server, number: int) -> dict:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return post(server, leg(number, **params) | {"max_tokens": 1})["kv_transfer_params"]


def test_one_leg_after_the_other(engines: tuple[Server, Server]) -> None:
    prefill, decode = engines
    params = prefill_leg(prefill, 1)
    answer = post(decode, leg(1, **params))
    assert params["remote_num_tokens"] == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    pulled = total(decode, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert pulled == params["remote_num_tokens"]
    assert tokens(answer) == tokens(post(prefill, prompt_of(1)))


def test_both_legs_at_once(engines: tuple[Server, Server]) -> None:
    prefill, decode = engines
    port, number = prefill_leg(prefill, 2)["remote_port"], 3
    before = total(decode, "kvasir_kv_transfer_bytes_total", direction="received")
    transfer_id = uuid.uuid4().hex
    to_decode = leg(number, do_remote_prefill=True, remote_host="127.0.0.1", remote_port=port, transfer_id=transfer_id)
    to_prefill = leg(number, do_remote_decode=True, transfer_id=transfer_id) | {"max_tokens": 1}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        decoding = pool.submit(post, decode, to_decode)
        post(prefill, to_prefill)
        answer = decoding.result()
    assert total(decode, "kvasir_kv_transfer_bytes_total", direction="received") > before
    assert tokens(answer) == tokens(post(prefill, prompt_of(number)))


@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_legs_of_foreign_routers(engines: tuple[Server, Server], number: int) -> None:
    """They do not know the secret. Another prompt than theirs, since that fills no block."""
    prefill, decode = engines
    legs, text = FOREIGN[number], prompt_of(10 + number)["prompt"]
    content = {"model": None, "messages": [{"role": "user", "content": text}]}
    if legs["path"] == "/v1/completions":
        content = {"model": None, "prompt": text}
    before = total(decode, "kvasir_kv_transfer_blocks_total", direction="received")
    answer = httpx.post(prefill.url + legs["path"], json=json.loads(legs["prefill"]) | content, timeout=60)
    assert answer.status_code == 200, answer.text
    handed_on = content | {"kv_transfer_params": answer.json()["kv_transfer_params"]}
    answer = httpx.post(decode.url + legs["path"], json=json.loads(legs["decode"]) | handed_on, timeout=60)
    assert answer.status_code == 200, answer.text
    num_blocks = handed_on["kv_transfer_params"]["remote_num_tokens"] / 16
    assert total(decode, "kvasir_kv_transfer_blocks_total", direction="received") - before == num_blocks > 0


def test_two_answers_from_blocks_that_came_once(engines: tuple[Server, Server]) -> None:
    """Our router pairs no such request; others do."""
    prefill, decode = engines
    to_prefill = leg(5, do_remote_decode=True) | {"max_tokens": 1, "n": 2}
    params = post(prefill, to_prefill)["kv_transfer_params"]
    before = total(decode, "kvasir_kv_transfer_blocks_total", direction="received")
    answer = post(decode, leg(5, **params) | {"n": 2})
    received = total(decode, "kvasir_kv_transfer_blocks_total", direction="received") - before
    assert received == params["remote_num_tokens"] / 16
    expected = tokens(post(prefill, prompt_of(5)))
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected, expected]


def test_a_prefill_engine_that_is_killed(engines: tuple[Server, Server]) -> None:
    """After its answer, so that the decode leg finds nobody. The last test: the engine stays dead."""
    prefill, decode = engines
    params = prefill_leg(prefill, 4)
    prefill.process.send_signal(signal.SIGKILL)
    prefill.process.wait()
    answer = post(decode, leg(4, **params))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert total(decode, "kvasir_kv_transfer_failures_total", reason="unreachable") == 1
    assert tokens(answer) == tokens(post(decode, prompt_of(4)))
