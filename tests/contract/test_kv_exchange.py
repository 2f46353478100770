"""Real engines behind a real router, all processes. A prefix that one has cached is fetched by another that gets
the request, and where it cannot be had, computed there; the tokens are the same. A stream whose engine is to stop goes
on in another one from the same KV, and its client sees one unbroken stream of the right tokens.

The engines are shared; who stops one comes last.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.engines import (
    Engine,
    all_ready,
    num_failed,
    num_in_flight,
    num_received,
    signal_all,
    total,
    wait_for,
)
from tests.plain_http import CLIENT
from tests.runtime.cli.conftest import a_free_port, free_ports_in_a_row

from kvasir_router.config import KvEventPorts

MODEL = Path("examples/models/kvasir-python-700k")
COMPLETION = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
ROUTER = str(Path(sys.executable).parent / "kvasir-router")
SIZE = 16
NUM_TOKENS = 1000
NUM_CACHED = (NUM_TOKENS - 1) // SIZE * SIZE
MAX_RANKS = 2
# Small steps make prefill slow enough for fetching to pay on any machine.
FLAGS = ("--max-num-batched-tokens", "32")


@dataclass
class Router:
    url: str
    admin_url: str
    log_file: Path

    def knows(self, engines: Sequence[Engine]) -> bool:
        """That they are ready, exchange KV, which idle ones say every 10 s, and have told all that they have cached."""
        try:
            known = self._endpoints()
        except httpx.ConnectError:
            return False
        return all(
            known[engine.url]["kv_transfer_port"]
            and known[engine.url]["state"] == "ready"
            and known[engine.url]["kv_events"]["is_complete"]
            for engine in engines
        )

    def num_blocks(self, engine: Engine) -> int:
        return int(self._endpoints()[engine.url]["prefix_blocks"])

    def has_asked_to_hand_over(self, engine: Engine) -> bool:
        return f"{engine.url} asked to hand it over: 202" in self.log_file.read_text()

    def num_fetches(self) -> float:
        families = text_string_to_metric_families(CLIENT.get(f"{self.admin_url}/metrics").text)
        name = "kvasir_router_prefix_fetches_total"
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def _endpoints(self) -> dict[str, dict[str, Any]]:
        return {each["url"]: each for each in CLIENT.get(f"{self.admin_url}/endpoints").json()}


@pytest.fixture(scope="module")
def first_port() -> int:
    """Of the engines' events and replays, at which all of their ranks listen, and of their side channels."""
    return free_ports_in_a_row(3 * MAX_RANKS)


@pytest.fixture(scope="module")
def engines(first_port: int) -> Iterator[list[Engine]]:
    """Three of one revision, two of them of two data-parallel ranks, and one that says to be of another, whose blocks
    they refuse."""
    ports = KvEventPorts(first_port, first_port + MAX_RANKS)
    channel = {"side_channel_port": first_port + 2 * MAX_RANKS}
    kinds = ((2, "one", 2), (3, "one", 1), (4, "other", 1), (11, "one", 2))
    servers = [
        Engine(MODEL, number, ports, *FLAGS, "--data-parallel-size", str(num_ranks), revision=revision, **channel)
        for number, revision, num_ranks in kinds
    ]
    with all_ready(servers):
        yield servers


StartRouter = Callable[..., Router]


@pytest.fixture
def start_router(first_port: int, tmp_path: Path) -> Iterator[StartRouter]:
    """start_router(*engines): it places by turns, so that where a prefix is says nothing about who gets the request,
    and knows that they exchange KV. `decodes`: for which they prefill.
    """
    with ExitStack() as stack:

        def start(*behind: Engine, decodes: Sequence[Engine] = ()) -> Router:
            port, admin_port, log_file = a_free_port(), a_free_port(), tmp_path / "log"
            flag = "--prefill-endpoint" if decodes else "--endpoint"
            endpoints = [word for engine in behind for word in (flag, engine.url)]
            endpoints += [word for engine in decodes for word in ("--decode-endpoint", engine.url)]
            if behind and decodes:
                side_channel = str(first_port + 2 * MAX_RANKS)
                endpoints += ["--remote-prefill-min-tokens", "0", "--kv-transfer-port", side_channel]
            events = f"{first_port}:{first_port + MAX_RANKS}"
            flags = (
                "--policy",
                "roundRobin",
                "--kv-events",
                events,
                "--log-level",
                "debug",
                "--probe-interval",
                "100ms",
            )
            with log_file.open("w") as log:
                process = subprocess.Popen(
                    [ROUTER, "serve", "--port", str(port), "--admin-port", str(admin_port), *flags, *endpoints],
                    stderr=log,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            router = Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", log_file)
            wait_for(lambda: router.knows((*behind, *decodes)))
            return router

        yield start


def prompt(number: int) -> list[int]:
    return [5 + (number * 101 + position * 37) % 400 for position in range(NUM_TOKENS)]


def ask(url: str, number: int) -> dict:
    return complete(url, prompt(number))


def complete(url: str, token_ids: list[int], max_tokens: int = 16) -> dict:
    body = COMPLETION | {"prompt": token_ids, "max_tokens": max_tokens}
    answer = CLIENT.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked_at_once(engine: Engine, numbers: Sequence[int]) -> list[dict]:
    """All have arrived, one after another, before its cores compute anything."""
    cores = engine.engine_cores()
    with ThreadPoolExecutor() as pool:
        signal_all(cores, signal.SIGSTOP)
        try:
            answers = []
            for number in numbers:
                answers.append(pool.submit(ask, engine.url, number))
                wait_for(lambda: num_in_flight(engine) == len(answers))
        finally:
            signal_all(cores, signal.SIGCONT)
        return [answer.result() for answer in answers]


def tokens(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def num_cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_prefix_that_a_peer_has_cached_is_fetched(engines: list[Engine], start_router: StartRouter) -> None:
    """Whichever rank of the peer has it."""
    holder, other, *_ = engines
    router = start_router(holder, other)
    numbers = (1, 3)
    computed = asked_at_once(holder, numbers)  # one by each rank
    wait_for(lambda: router.num_blocks(holder) >= 2 * (NUM_TOKENS // SIZE))
    for number, of_holder in zip(numbers, computed, strict=True):
        answers = [ask(router.url, number) for _ in range(2)]  # one of them by each
        assert [tokens(answer) for answer in answers] == [tokens(of_holder)] * 2
        assert sorted(num_cached(answer) for answer in answers) == [0, NUM_CACHED]  # what came from a peer was not
    assert router.num_fetches() == 2
    assert total(other, "kvasir_kv_transfer_blocks_total", direction="received") == 2 * NUM_CACHED // SIZE
    assert total(holder, "kvasir_kv_transfer_blocks_total", direction="sent") == 2 * NUM_CACHED // SIZE
    assert num_failed(other) == 0


def test_what_a_peer_does_not_give_is_computed(engines: list[Engine], start_router: StartRouter) -> None:
    """The router takes them for one revision, and they refuse each other's blocks."""
    other, _, stranger, _ = engines
    router = start_router(other, stranger)
    computed = ask(stranger.url, 2)
    wait_for(lambda: router.num_blocks(stranger) >= NUM_TOKENS // SIZE)
    answers = [ask(router.url, 2) for _ in range(2)]
    assert [tokens(answer) for answer in answers] == [tokens(computed)] * 2
    assert sorted(num_cached(answer) for answer in answers) == [0, NUM_CACHED]
    assert router.num_fetches() == 1
    assert total(other, "kvasir_kv_transfer_failures_total", reason="handshake") == 1


def test_an_engine_that_prefills_for_another_fetches_what_a_peer_has_cached(
    engines: list[Engine], start_router: StartRouter
) -> None:
    """From the second rank of the peer."""
    other, decode, _, holder = engines
    router = start_router(holder, other, decodes=[decode])
    before_other, before_decode = num_received(other), num_received(decode)
    num_failed_before = num_failed(other)
    computed = asked_at_once(holder, (4, 5, 6, 7))[1::2]  # by the ranks in turn
    wait_for(lambda: router.num_blocks(holder) >= 4 * (NUM_TOKENS // SIZE))
    answers = [ask(router.url, number) for number in (5, 7)]  # prefilled by one of them each
    assert [tokens(answer) for answer in answers] == [tokens(each) for each in computed]
    assert [num_cached(answer) for answer in answers] == [0, 0]
    assert router.num_fetches() == 1
    wait_for(lambda: num_received(other) == before_other + NUM_CACHED // SIZE)
    wait_for(lambda: num_received(decode) == before_decode + 2 * NUM_CACHED // SIZE)
    assert num_failed(other) == num_failed_before


def test_a_former_answer_is_fetched_from_the_engine_that_decoded_it(
    engines: list[Engine], start_router: StartRouter
) -> None:
    """By the engine that prefills the next turn, which is decoded by another; then by the one that has the answer, to
    which only the blocks behind it are sent."""
    other, prefill, alone, decode = engines
    router = start_router(prefill, decodes=[decode, other])  # which decode by turns, in the order of their addresses
    num_failed_before = list(map(num_failed, engines))
    num_before, num_known = received(prefill, decode, other), router.num_blocks(decode)
    num_answered = 640
    first = complete(router.url, prompt(8), num_answered)
    num_held = (NUM_TOKENS + num_answered - 1) // SIZE
    wait_for(lambda: router.num_blocks(decode) == num_known + num_held)
    second = prompt(8) + tokens(first) + prompt(9)[:100]
    num_full = (len(second) - 1) // SIZE
    answers = [complete(router.url, second) for _ in range(2)]
    assert [tokens(answer) for answer in answers] == [tokens(complete(alone.url, second))] * 2
    assert [num_cached(answer) for answer in answers] == [0, num_held * SIZE]
    assert router.num_fetches() == 1
    num_prompt = NUM_CACHED // SIZE
    expected = [num_held - num_prompt, num_prompt + num_full - num_held, num_full]
    assert [now - before for now, before in zip(received(prefill, decode, other), num_before, strict=True)] == expected
    assert list(map(num_failed, engines)) == num_failed_before


def received(*engines: Engine) -> list[float]:
    return [num_received(engine) for engine in engines]


STREAM = COMPLETION | {
    "prompt": Path("runtime/kvasir_runtime/scheduling/planner.py").read_text()[:600], "max_tokens": 400,
}  # fmt: skip
SAMPLED = STREAM | {"temperature": 0.9, "top_p": 0.95, "seed": 7}


def test_a_stream_goes_on_elsewhere_when_its_engine_is_told_to_stop(
    engines: list[Engine], start_router: StartRouter
) -> None:
    """One of several data ranks."""
    first, _, _, second = engines
    check_that_a_stream_goes_on_elsewhere(start_router, first, second, STREAM)


def test_a_sampled_stream_goes_on_elsewhere_too(engines: list[Engine], start_router: StartRouter) -> None:
    """With an engine of other data ranks."""
    first, single, _, second = engines
    (left,) = [engine for engine in (first, second) if engine.process.poll() is None]
    check_that_a_stream_goes_on_elsewhere(start_router, left, single, SAMPLED)


@pytest.mark.slow
def test_a_stream_of_tensor_parallel_engines_goes_on_elsewhere(start_router: StartRouter, first_port: int) -> None:
    ports = KvEventPorts(first_port, first_port + MAX_RANKS)
    pair = [Engine(MODEL, number, ports, *FLAGS, "--tensor-parallel-size", "2") for number in (12, 13)]
    with all_ready(pair):
        check_that_a_stream_goes_on_elsewhere(start_router, *pair, STREAM)


def check_that_a_stream_goes_on_elsewhere(
    start_router: StartRouter, one: Engine, other: Engine, body: dict[str, Any]
) -> None:
    engines = (one, other)
    router = start_router(decodes=engines)
    cores = [engine.engine_cores() for engine in engines]
    try:
        seen, events, old = a_stream_caught_under_way(engines, cores, router, body)
        (new,) = [engine for engine in engines if engine is not old]
        num_received_before, num_failed_before = num_received(new), num_failed(new)
        old.process.terminate()
        wait_for(lambda: router.has_asked_to_hand_over(old))
    finally:
        signal_all(chain(*cores), signal.SIGCONT)
    for tokens in events:
        seen += tokens
    whole = CLIENT.post(f"{new.url}/v1/completions", json=body, timeout=120).json()
    assert seen == whole["choices"][0]["token_ids"]
    assert len(set(seen)) > 1
    assert old.process.wait(20) == 0
    num_pulled = num_received(new) - num_received_before
    assert num_pulled >= whole["usage"]["prompt_tokens"] // SIZE, "what was written before is there as well"
    assert num_failed(new) == num_failed_before


def a_stream_caught_under_way(
    engines: Sequence[Engine], cores: list[list[int]], router: Router, body: dict[str, Any]
) -> tuple[list[int], Iterator[list[int]], Engine]:
    """Its first tokens, its other events, and its engine, whose cores stand still, so it cannot end."""
    while True:
        events = token_events(router.url, body)
        seen = next(events)
        signal_all(chain(*cores), signal.SIGSTOP)
        for engine, own in zip(engines, cores, strict=True):
            if num_in_flight(engine) and is_drawing(engine):
                signal_all(chain(*(others for others in cores if others != own)), signal.SIGCONT)
                return seen, events, engine
        signal_all(chain(*cores), signal.SIGCONT)  # it had ended already


def token_events(url: str, body: dict[str, Any]) -> Iterator[list[int]]:
    """Token ids, event by event, of a stream that must end well."""
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=120) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        for line in lines:
            if line == "[DONE]":
                return
            yield json.loads(line)["choices"][0]["token_ids"]
    raise AssertionError("the stream ended in the middle")


def is_drawing(engine: Engine) -> bool:
    """Its cores, which stand still: by its last word, once the API process has read all that came before. What it has
    drawn may be on its way to the client long after the last token.
    """
    known: list[float] = []
    while known != (known := core_figures(engine)):
        time.sleep(0.1)
    return known[0] > 0


def core_figures(engine: Engine) -> list[float]:
    return [total(engine, name) for name in ("kvasir_num_requests_running", "kvasir_generation_tokens_total")]
