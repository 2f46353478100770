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
COMPLETION = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
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
        """That they are ready, and exchange KV: what an idle engine says every 10 s."""
        try:
            known = self._endpoints()
        except httpx.ConnectError:
            return False
        return all(
            known[engine.url]["kv_transfer_port"] and known[engine.url]["state"] == "ready" for engine in engines
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
    """start_router(*engines): once it knows that they exchange KV. `decode`: for which they prefill."""
    with ExitStack() as stack:

        def start(*behind: Engine, decode: Engine | None = None) -> Router:
            port, admin_port = a_free_port(), a_free_port()
            flag = "--endpoint" if decode is None else "--prefill-endpoint"
            endpoints = [word for engine in behind for word in (flag, engine.url)]
            if decode is not None:
                endpoints += ["--decode-endpoint", decode.url, "--remote-prefill-min-tokens", "0"]
                endpoints += ["--kv-transfer-port", str(decode.side_channel)]
            ports = ("--port", str(port), "--admin-port", str(admin_port))
            process = subprocess.Popen(
                [ROUTER, "serve", *ports, "--policy", "roundRobin", "--kv-events", behind[0].event_ports, *endpoints]
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            router = Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
            wait_for(lambda: router.knows(behind))
            return router

        yield start


def prompt(number: int) -> list[int]:
    return [5 + (number * 101 + position * 37) % 400 for position in range(NUM_TOKENS)]


def ask(url: str, number: int) -> dict:
    answer = httpx.post(f"{url}/v1/completions", json=COMPLETION | {"prompt": prompt(number)}, timeout=60)
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
    router = start_router(holder, other, decode=decode)
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


def num_received(engine: Engine) -> float:
    return total(engine, "kvasir_kv_transfer_blocks_total", direction="received")
