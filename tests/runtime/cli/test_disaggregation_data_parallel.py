"""`serve` processes whose data-parallel ranks exchange KV, each for itself, over a trained model and NIXL: from any of
them to any of another engine, or to an engine of one rank. The answers are one engine's own."""

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.runtime.cli.conftest import Server, free_ports_in_a_row
from tests.runtime.cli.test_disaggregation import COMPLETION, MODEL, TEXT, tokens, total

HOST = f"127.77.{os.getpid() % 251}.{1 + os.getpid() // 251 % 251}"
"""Of this process alone: the ports after one that is free are free as well, and stay so."""
NUM_RANKS = 2
NUM_REQUESTS = 4
LEASE_SECONDS = 6
FLAGS = {
    "one": (),
    "two": ("--data-parallel-size", str(NUM_RANKS)),
    "two of two": ("--data-parallel-size", str(NUM_RANKS), "--tensor-parallel-size", "2"),
}
TURNS = [
    ("two of two", "two", "in turn"), ("two of two", "two", "at once"), ("one", "two", "at once"),
    ("two", "one", "in turn"),
]  # fmt: skip


class Engine(Server):
    def __init__(self, *flags: str) -> None:
        self.first_port = free_ports_in_a_row(NUM_RANKS, HOST)
        extra = {"side_channel_host": HOST, "side_channel_port": self.first_port, "lease_seconds": LEASE_SECONDS}
        config = {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra}
        super().__init__(
            MODEL, "--kv-transfer-config", json.dumps(config), "--dtype", "float32", "--max-num-seqs", "16",
            "--max-num-batched-tokens", "64", *flags,
        )  # fmt: skip


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    made = {name: Engine(*flags) for name, flags in FLAGS.items()}
    try:
        for engine in made.values():
            engine.wait_ready()
        yield made
    finally:
        for engine in made.values():
            engine.process.kill()
            engine.end()


def prompt_of(number: int) -> dict[str, Any]:
    """Of no other's beginning."""
    return COMPLETION | {"prompt": f"{number} {TEXT[:700]}"}


def post(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextmanager
def standing_still(*engines: Engine) -> Iterator[None]:
    """Their cores compute nothing, so that each request finds those before it in the way of its engine's ranks."""
    cores = [core for engine in engines for core in engine.engine_cores()]
    signal_all(cores, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(cores, signal.SIGCONT)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def asked_at_once(
    pool: ThreadPoolExecutor, engine: Engine, bodies: Sequence[dict[str, Any]]
) -> list[Future[dict[str, Any]]]:
    """Of an engine that stands still: they have all arrived."""
    answers = [pool.submit(post, engine, body) for body in bodies]
    wait_for(lambda: num_in_flight(engine) == len(bodies))
    return answers


def num_in_flight(engine: Engine) -> int:
    return int(httpx.get(f"{engine.url}/drain").json()["in_flight_requests"])


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_all_free(engine: Engine) -> bool:
    leased = total(engine, "kvasir_kv_transfer_leased_blocks")
    return leased == total(engine, "kvasir_kv_cache_used_tokens") == num_in_flight(engine) == 0


def prefill_legs(pool: ThreadPoolExecutor, engine: Engine, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the decode legs are to be asked with."""
    to_prefill = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with standing_still(engine):
        answers = asked_at_once(pool, engine, [body | to_prefill for body in bodies])
    return [answer.result()["kv_transfer_params"] for answer in answers]


def expected_of(engines: dict[str, Engine], bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Computed by one engine of one rank, from nothing that it was sent."""
    return [tokens(post(engines["one"], body | {"cache_salt": uuid.uuid4().hex})) for body in bodies]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * NUM_REQUESTS) as pool:
        yield pool


@pytest.mark.parametrize(("giver", "taker", "form"), TURNS)
def test_every_rank_gives_and_takes(
    engines: dict[str, Engine], pool: ThreadPoolExecutor, giver: str, taker: str, form: str
) -> None:
    prefill, decode = engines[giver], engines[taker]
    first = NUM_REQUESTS * TURNS.index((giver, taker, form))
    bodies = [prompt_of(number) for number in range(first, first + NUM_REQUESTS)]
    before = figures(prefill, decode)
    if form == "in turn":
        params = prefill_legs(pool, prefill, bodies)
        ports = {each["remote_port"] - prefill.first_port for each in params}
        assert ports == set(range(len(prefill.engine_cores())))
        to_decode = [body | {"kv_transfer_params": each} for body, each in zip(bodies, params, strict=True)]
        with standing_still(decode):
            decoding = asked_at_once(pool, decode, to_decode)
    else:
        ids = [uuid.uuid4().hex for _ in bodies]
        place = {"do_remote_prefill": True, "remote_host": HOST, "remote_port": prefill.first_port}
        to_decode = [
            body | {"kv_transfer_params": place | {"transfer_id": key}} for body, key in zip(bodies, ids, strict=True)
        ]
        to_prefill = [
            body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": key}}
            for body, key in zip(bodies, ids, strict=True)
        ]
        with standing_still(prefill, decode):
            decoding = asked_at_once(pool, decode, to_decode)
            asked_at_once(pool, prefill, to_prefill)
    answers = [each.result() for each in decoding]
    assert [tokens(answer) for answer in answers] == expected_of(engines, bodies)
    num_blocks = sum((answer["usage"]["prompt_tokens"] - 1) // 16 for answer in answers)
    wait_for(lambda: is_all_free(prefill) and is_all_free(decode))
    sent, received, failures, *steps = [now - then for now, then in zip(figures(prefill, decode), before, strict=True)]
    assert (sent, received, failures) == (num_blocks, num_blocks, 0)
    assert all(steps), "every rank takes part"


def figures(prefill: Engine, decode: Engine) -> list[float]:
    """Blocks sent and received, pulls that failed, and the steps of each data-parallel rank."""
    steps = [
        total(engine, "kvasir_data_parallel_engine_steps_total", data_parallel_rank=str(rank))
        for engine in (prefill, decode)
        if len(engine.engine_cores()) > 1
        for rank in range(NUM_RANKS)
    ]
    return [
        total(prefill, "kvasir_kv_transfer_blocks_total", direction="sent"),
        total(decode, "kvasir_kv_transfer_blocks_total", direction="received"),
        total(decode, "kvasir_kv_transfer_failures_total"),
        *steps,
    ]


def test_clients_that_leave_strand_no_block_of_any_rank(engines: dict[str, Engine], pool: ThreadPoolExecutor) -> None:
    """Some after the first leg, some in the middle of the second, others stay."""
    prefill, decode = engines["two"], engines["two of two"]
    bodies = [prompt_of(number) for number in range(100, 100 + 2 * NUM_REQUESTS)]
    params = prefill_legs(pool, prefill, bodies)
    to_decode = [body | {"kv_transfer_params": each} for body, each in zip(bodies, params, strict=True)]
    for body in to_decode[0::4]:
        leave_after_first_event(decode, body)
    staying = to_decode[1::4]
    answers = [each.result() for each in [pool.submit(post, decode, body) for body in staying]]
    assert [tokens(answer) for answer in answers] == expected_of(engines, bodies[1::4])
    wait_for(lambda: is_all_free(prefill) and is_all_free(decode))
    assert total(prefill, "kvasir_kv_transfer_leases_ended_total", reason="expired") == NUM_REQUESTS


def leave_after_first_event(engine: Engine, body: dict[str, Any]) -> None:
    url, body = f"{engine.url}/v1/completions", body | {"stream": True, "max_tokens": 400}
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        next(answer.iter_lines())


def test_what_a_rank_was_to_give_that_dies_is_computed(engines: dict[str, Engine], pool: ThreadPoolExecutor) -> None:
    """In the middle of being asked. The last test: its engine ends with it."""
    prefill, decode = engines["two"], engines["one"]
    bodies = [prompt_of(number) for number in range(200, 202)]
    params = prefill_legs(pool, prefill, bodies)
    dying = prefill.engine_cores()[1]
    [(body, place)] = [
        pair for pair in zip(bodies, params, strict=True) if pair[1]["remote_port"] == prefill.first_port + 1
    ]
    os.kill(dying, signal.SIGSTOP)
    answer = pool.submit(post, decode, body | {"kv_transfer_params": place})
    wait_for(lambda: total(decode, "kvasir_num_requests_held") == 1)
    os.kill(dying, signal.SIGKILL)
    assert tokens(answer.result()) == expected_of(engines, [body])[0]
    assert total(decode, "kvasir_kv_transfer_failures_total", reason="unreachable") == 1
    status, log = prefill.end()
    assert status == 1, log
    assert "its process ended with status -9" in log
    wait_for(lambda: is_all_free(decode))
