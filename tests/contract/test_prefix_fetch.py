"""Real engines behind a real router: a prefix that one has cached is fetched by another that gets the request, and
where it cannot be had, computed there; the tokens are the same."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from benchmarks.exchanging_engine import exchanging
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.test_migration import num_in_flight, signal_all, total, wait_for
from tests.runtime.cli.conftest import Server, a_free_port, free_ports_in_a_row

MODEL = Path("examples/models/kvasir-python-700k")
COMPLETION = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
ROUTER = str(Path(sys.executable).parent / "kvasir-router")
SIZE = 16
NUM_TOKENS = 1000
NUM_CACHED = (NUM_TOKENS - 1) // SIZE * SIZE
MAX_RANKS = 2
NUM_PORTS = 3 * MAX_RANKS


class Engine(Server):
    """On a host of its own, as a pod is. Small steps make prefill slow enough for fetching to pay on any machine."""

    def __init__(self, number: int, first_port: int, revision: str, num_ranks: int) -> None:
        self.host = f"127.0.0.{number}"
        events, replay, self.side_channel = range(first_port, first_port + NUM_PORTS, MAX_RANKS)
        self.event_ports = f"{events}:{replay}"
        super().__init__(
            MODEL, *exchanging(self.host, events, replay, revision=revision, side_channel_port=self.side_channel),
            "--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "32",
            "--data-parallel-size", str(num_ranks),
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass
class Router:
    """It places by turns: where a prefix is says nothing about who gets the request."""

    url: str
    admin_url: str

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

    def _endpoints(self) -> dict[str, dict]:
        return {each["url"]: each for each in httpx.get(f"{self.admin_url}/endpoints").json()}

    def num_fetches(self) -> float:
        families = text_string_to_metric_families(httpx.get(f"{self.admin_url}/metrics").text)
        name = "kvasir_router_prefix_fetches_total"
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """Three of one revision, two of them of two data-parallel ranks, and one that says to be of another, whose blocks
    they refuse."""
    first_port = free_ports_in_a_row(NUM_PORTS)
    kinds = ((2, "one", 2), (3, "one", 1), (4, "other", 1), (11, "one", 2))
    servers = [Engine(number, first_port, revision, num_ranks) for number, revision, num_ranks in kinds]
    try:
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.process.kill()
            server.end()


StartRouter = Callable[..., Router]


@pytest.fixture
def start_router() -> Iterator[StartRouter]:
    """start_router(*engines): once it knows that they exchange KV. `decodes`: for which they prefill."""
    with ExitStack() as stack:

        def start(*behind: Engine, decodes: Sequence[Engine] = ()) -> Router:
            port, admin_port = a_free_port(), a_free_port()
            flag = "--prefill-endpoint" if decodes else "--endpoint"
            endpoints = [word for engine in behind for word in (flag, engine.url)]
            endpoints += [word for engine in decodes for word in ("--decode-endpoint", engine.url)]
            if decodes:
                endpoints += ["--remote-prefill-min-tokens", "0", "--kv-transfer-port", str(behind[0].side_channel)]
            ports = ("--port", str(port), "--admin-port", str(admin_port))
            process = subprocess.Popen(
                [ROUTER, "serve", *ports, "--policy", "roundRobin", "--kv-events", behind[0].event_ports, *endpoints]
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            router = Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
            wait_for(lambda: router.knows((*behind, *decodes)))
            return router

        yield start


def prompt(number: int) -> list[int]:
    return [5 + (number * 101 + position * 37) % 400 for position in range(NUM_TOKENS)]


def ask(url: str, number: int) -> dict:
    return complete(url, prompt(number))


def complete(url: str, token_ids: list[int], max_tokens: int = 16) -> dict:
    body = COMPLETION | {"prompt": token_ids, "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
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
        assert [num_cached(answer) for answer in answers] == [NUM_CACHED] * 2
    assert router.num_fetches() == 2
    assert total(other, "kvasir_kv_transfer_blocks_total", direction="received") == 2 * NUM_CACHED // SIZE
    assert total(holder, "kvasir_kv_transfer_blocks_total", direction="sent") == 2 * NUM_CACHED // SIZE
    assert total(other, "kvasir_kv_transfer_failures_total") == 0


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
    num_failed = total(other, "kvasir_kv_transfer_failures_total")
    computed = asked_at_once(holder, (4, 5, 6, 7))[1::2]  # by the ranks in turn
    wait_for(lambda: router.num_blocks(holder) >= 4 * (NUM_TOKENS // SIZE))
    answers = [ask(router.url, number) for number in (5, 7)]  # prefilled by one of them each
    assert [tokens(answer) for answer in answers] == [tokens(each) for each in computed]
    assert [num_cached(answer) for answer in answers] == [NUM_CACHED] * 2
    assert router.num_fetches() == 1
    wait_for(lambda: num_received(other) == before_other + NUM_CACHED // SIZE)
    wait_for(lambda: num_received(decode) == before_decode + 2 * NUM_CACHED // SIZE)
    assert total(other, "kvasir_kv_transfer_failures_total") == num_failed


def test_a_former_answer_is_fetched_from_the_engine_that_decoded_it(
    engines: list[Engine], start_router: StartRouter
) -> None:
    """By the engine that prefills the next turn, which is decoded by another; then by the one that has the answer, to
    which only the blocks behind it are sent."""
    other, prefill, alone, decode = engines
    router = start_router(prefill, decodes=[decode, other])  # which decode by turns, in the order of their addresses
    num_failed = [total(engine, "kvasir_kv_transfer_failures_total") for engine in engines]
    num_before, num_known = received(prefill, decode, other), router.num_blocks(decode)
    num_answered = 640
    first = complete(router.url, prompt(8), num_answered)
    num_held = (NUM_TOKENS + num_answered - 1) // SIZE
    wait_for(lambda: router.num_blocks(decode) == num_known + num_held)
    second = prompt(8) + tokens(first) + prompt(9)[:100]
    num_full = (len(second) - 1) // SIZE
    answers = [complete(router.url, second) for _ in range(2)]
    assert [tokens(answer) for answer in answers] == [tokens(complete(alone.url, second))] * 2
    assert [num_cached(answer) for answer in answers] == [num_full * SIZE] * 2
    assert router.num_fetches() == 1
    num_prompt = NUM_CACHED // SIZE
    expected = [num_held - num_prompt, num_prompt + num_full - num_held, num_full]
    assert [now - before for now, before in zip(received(prefill, decode, other), num_before, strict=True)] == expected
    assert [total(engine, "kvasir_kv_transfer_failures_total") for engine in engines] == num_failed


def received(*engines: Engine) -> list[float]:
    return [num_received(engine) for engine in engines]


def num_received(engine: Engine) -> float:
    return total(engine, "kvasir_kv_transfer_blocks_total", direction="received")
