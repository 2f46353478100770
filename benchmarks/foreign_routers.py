"""Routers of other makes before our engines: vLLM's router and llm-d's sidecar, each before one that prefills and one
that decodes, moved by NIXL over loopback.

    python benchmarks/foreign_routers.py [--only llm-d]

Greedy answers, whole and as streams, are compared with those of an engine that does both; clients leave at any moment;
the prefill engine is killed and comes back. Whatever is not as it should be ends the run with status 1. The wheel and
the Go module are fetched once.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from foreign_programs import HOST, ROUTERS, foreign_router, headers_for
from prometheus_client.parser import text_string_to_metric_families
from servers import WORK, Server, end_on_sigterm, this_machine

from kvasir_operator.local.network import free_port

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "models" / "kvasir-python-700k"
TEXT = "".join(file.read_text() for file in sorted((ROOT / "runtime" / "kvasir_runtime" / "scheduling").glob("*.py")))
PROMPT_CHARS = 2000
NUM_ANSWERS = 16
NUM_AT_ONCE = 4
ANSWER_TOKENS = 48
NUM_LEAVING = 48
LONG_ANSWER_TOKENS = 400
LONGEST_STAY_SECONDS = 0.5
LONGEST_STAY_CHUNKS = 100
LEASE_SECONDS = 5.0
IDLE_LIMIT_SECONDS = 60.0
ANSWER_LIMIT_SECONDS = 120.0
GREEDY = {"model": "m", "temperature": 0, "ignore_eos": True}
ENVIRONMENT = {"KVASIR_ROUTER_SECRET": "s3cret", "OMP_NUM_THREADS": "1"}
"""The routers know no secret; engines are sure of one another by it."""


@dataclass(frozen=True)
class Setup:
    """All run. `headers`: of a client's requests to the router."""

    router: Server
    prefill: Server
    decode: Server
    mixed: Server
    headers: dict[str, str]

    @property
    def pair(self) -> tuple[Server, Server]:
        return self.prefill, self.decode


class Prompts:
    """Each different from the first token on, so that none is found in a cache."""

    def __init__(self) -> None:
        self._num_taken = 0

    def take(self) -> str:
        start = self._num_taken * 97
        self._num_taken += 1
        assert start + PROMPT_CHARS <= len(TEXT)
        return TEXT[start : start + PROMPT_CHARS]


@dataclass(frozen=True)
class Question:
    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def question(prompt: str, *, is_chat: bool, is_stream: bool, max_tokens: int = ANSWER_TOKENS) -> Question:
    content = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Question(path, GREEDY | content | stream | {"max_tokens": max_tokens})


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    """Of the first choice; what was said instead where the status is not 200."""


def ask(url: str, question: Question, headers: dict[str, str] | None = None) -> Answer:
    answer = httpx.post(url + question.path, json=question.body, headers=headers, timeout=ANSWER_LIMIT_SECONDS)
    if answer.status_code != 200:
        return Answer(answer.status_code, answer.text)
    if not question.is_stream:
        return Answer(200, said(answer.json()))
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return Answer(200, "".join(said(json.loads(event)) for event in events))


def said(content: dict[str, Any]) -> str:
    if not content["choices"]:
        return ""  # the usage of a stream
    choice = content["choices"][0]
    spoken: str = choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]
    return spoken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="routers whose names contain it")
    options = parser.parse_args()
    end_on_sigterm()
    names = [name for name in ROUTERS if options.only in name]
    columns = [checked(name) for name in names]
    report = f"{heading()}\n\n{table(names, columns)}\n"
    print(report)
    if not options.only:
        path = ROOT / "benchmarks" / "results" / f"foreign_routers-{date.today()}.md"
        path.write_text(report)
        print(f"written to {path}")
    sys.exit(any(cell.startswith("WRONG") for column in columns for cell in column.values()))


def heading() -> str:
    return f"""# Routers of other makes before our engines, {date.today()}

`python benchmarks/foreign_routers.py` at {this_machine()}.

{MODEL.name} in float32, one engine that prefills, one that decodes (`--kv-transfer-trust-clients`, a secret between
themselves), a third that does both to compare with. Prompts of {PROMPT_CHARS} characters that have nothing in common,
{NUM_AT_ONCE} at once, completions and chat, whole and as streams. Leases last {LEASE_SECONDS:g} s. Half of the
clients that leave do so within {LONGEST_STAY_SECONDS:g} s, half after up to {LONGEST_STAY_CHUNKS} lines."""


def table(names: list[str], columns: list[dict[str, str]]) -> str:
    lines = [f"| {' | '.join(['', *names])} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {' | '.join([row, *(column[row] for column in columns)])} |" for row in columns[0]]
    return "\n".join(lines)


def checked(name: str) -> dict[str, str]:
    """Row -> what was seen; it begins with WRONG where it is not what it should be."""
    prompts, cells = Prompts(), dict[str, str]()
    with running(name) as setup:
        for check in (check_answers, check_leaving, check_dead_prefill, check_prefill_that_is_back):
            for row, cell in check(setup, prompts).items():
                cells[row] = cell
                print(f"{name}, {row}: {cell}", flush=True)
    return cells


def check_answers(setup: Setup, prompts: Prompts) -> dict[str, str]:
    questions = [
        question(prompts.take(), is_chat=number % 2 > 0, is_stream=number % 4 > 1) for number in range(NUM_ANSWERS)
    ]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        got = list(pool.map(lambda one: ask(setup.router.url, one, setup.headers), questions))
    seconds_until_idle(setup.pair)
    num_equal = sum(answer == ask(setup.mixed.url, one) for answer, one in zip(got, questions, strict=True))
    sent, received = (
        total(engine, "kvasir_kv_transfer_blocks_total", direction=direction)
        for engine, direction in zip(setup.pair, ("sent", "received"), strict=True)
    )
    failures = num_failures(setup)
    return {
        "answers equal to the mixed engine's": verdict(
            f"{num_equal} of {NUM_ANSWERS}", is_right=num_equal == NUM_ANSWERS
        ),
        "blocks sent, received": verdict(f"{sent:g}, {received:g}", is_right=sent == received >= NUM_ANSWERS),
        "failed pulls": verdict(f"{failures:g}", is_right=not failures),
    }


def check_leaving(setup: Setup, prompts: Prompts) -> dict[str, str]:
    """Half of the clients leave early: while the prompt is computed, between the legs, while blocks come; half amid a
    stream."""
    rng, failures = random.Random(0), num_failures(setup)
    tokens, ends = total(setup.decode, "kvasir_generation_tokens_total"), lease_ends(setup.prefill)
    stays = []
    for number in range(NUM_LEAVING):
        is_early, is_chat = number % 2 > 0, number % 4 > 1
        one = question(prompts.take(), is_chat=is_chat, is_stream=not is_early, max_tokens=LONG_ANSWER_TOKENS)
        seconds = rng.uniform(0.005, LONGEST_STAY_SECONDS) if is_early else ANSWER_LIMIT_SECONDS
        stays.append((one, seconds, rng.randint(1, LONGEST_STAY_CHUNKS)))
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for leaving in [pool.submit(leave, setup, *stay) for stay in stays]:
            leaving.result()
    seconds_left = seconds_until_idle(setup.pair)
    num_tokens = total(setup.decode, "kvasir_generation_tokens_total") - tokens
    most = NUM_LEAVING * LONG_ANSWER_TOKENS
    new_failures = num_failures(setup) - failures
    ended = lease_ends(setup.prefill) - ends
    return {
        f"{NUM_LEAVING} clients leave: tokens made for them": verdict(
            f"{num_tokens:g} of {most}", is_right=0 < num_tokens < most
        ),
        "seconds until no block is in use or leased on either side": verdict(
            "never" if seconds_left is None else f"{seconds_left:.1f}", is_right=seconds_left is not None
        ),
        "failed pulls of theirs": verdict(f"{new_failures:g}", is_right=not new_failures),
        "how their leases ended": ", ".join(f"{reason} {count}" for reason, count in sorted(ended.items())),
    }


def leave(setup: Setup, question: Question, seconds: float, num_chunks: int) -> None:
    """After so long without a byte, or with so many pieces of the answer; the connection is closed."""
    url = setup.router.url + question.path
    with httpx.Client(timeout=seconds) as client:
        try:
            with client.stream("POST", url, json=question.body, headers=setup.headers) as answer:
                for number, _ in enumerate(answer.iter_lines()):
                    if number == num_chunks:
                        return
        except httpx.TimeoutException:
            return


def check_dead_prefill(setup: Setup, prompts: Prompts) -> dict[str, str]:
    kill(setup.prefill)
    one = question(prompts.take(), is_chat=False, is_stream=False)
    begin = time.monotonic()
    answer = ask(setup.router.url, one, setup.headers)
    seconds = time.monotonic() - begin
    expected = ask(setup.mixed.url, one)
    told = "the mixed engine's" if answer == expected else answer.text.replace("\n", " ").replace("|", "/")[:160]
    alone = ask(setup.decode.url, one)
    health = httpx.get(f"{setup.decode.url}/health").status_code
    return {
        "prefill engine killed: the router's answer": f"{answer.status} after {seconds:.1f} s: {told}",
        "the decode engine meanwhile": verdict(
            f"/health {health}, its own answer {'equal' if alone == expected else alone}",
            is_right=health == 200 and alone == expected,
        ),
    }


def check_prefill_that_is_back(setup: Setup, prompts: Prompts) -> dict[str, str]:
    """As a pod that was restarted in place: the same port, and everything else new."""
    setup.prefill.start(WORK / "foreign_routers-prefill-again.log")
    received = total(setup.decode, "kvasir_kv_transfer_blocks_total", direction="received")
    begin, expected = time.monotonic(), None
    while True:
        one = question(prompts.take(), is_chat=False, is_stream=False)
        answer, expected = ask(setup.router.url, one, setup.headers), ask(setup.mixed.url, one)
        new = total(setup.decode, "kvasir_kv_transfer_blocks_total", direction="received") - received
        seconds = time.monotonic() - begin
        if new or seconds > IDLE_LIMIT_SECONDS:
            break
        time.sleep(1)
    return {
        "prefill engine back: first answer with its blocks": verdict(
            f"{answer.status} after {seconds:.0f} s, {new:g} blocks, {'equal' if answer == expected else answer.text}",
            is_right=bool(new) and answer == expected,
        )
    }


def verdict(seen: str, *, is_right: bool) -> str:
    return seen if is_right else f"WRONG: {seen}"


@contextmanager
def running(name: str) -> Iterator[Setup]:
    with ExitStack() as stack:
        prefill, decode, mixed = engine("prefill", "kv_producer"), engine("decode", "kv_consumer"), engine("mixed")
        for server in (prefill, decode, mixed):
            stack.callback(server.stop)
            server.start(WORK / f"foreign_routers-{server.name}.log")
        router = foreign_router(name, prefill, decode)
        stack.callback(router.stop)
        router.start(WORK / f"foreign_routers-{router.name}.log")
        yield Setup(router, prefill, decode, mixed, headers_for(name, prefill))


def engine(name: str, kv_role: str | None = None) -> Server:
    port = free_port(HOST)
    command = [
        sys.executable, "-m", "kvasir_runtime", "serve", str(MODEL), "--served-model-name", "m", "--port", str(port),
        "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
    ]  # fmt: skip
    if kv_role is not None:
        extra = {"side_channel_host": HOST, "side_channel_port": 0, "lease_seconds": LEASE_SECONDS}
        config = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_connector_extra_config": extra}
        command += ["--kv-transfer-config", json.dumps(config), "--kv-transfer-trust-clients"]
    return Server(name, command, port, ENVIRONMENT, ready_path="/ready")


def kill(server: Server) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def seconds_until_idle(engines: tuple[Server, ...]) -> float | None:
    """None: not within the limit."""
    begin = time.monotonic()
    while (seconds := time.monotonic() - begin) < IDLE_LIMIT_SECONDS:
        if all(is_idle(engine) for engine in engines):
            return seconds
        time.sleep(0.1)
    return None


def is_idle(engine: Server) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "kv_transfer_leased_blocks")
    return not any(total(engine, f"kvasir_{name}") for name in names)


def num_failures(setup: Setup) -> float:
    return sum(total(engine, "kvasir_kv_transfer_failures_total") for engine in setup.pair)


def lease_ends(engine: Server) -> Counter[str]:
    name = "kvasir_kv_transfer_leases_ended_total"
    return Counter({labels["reason"]: int(value) for labels, value in samples(engine, name)})


def total(engine: Server, name: str, **labels: str) -> float:
    return sum(value for has, value in samples(engine, name) if labels.items() <= has.items())


def samples(engine: Server, name: str) -> list[tuple[dict[str, str], float]]:
    families = text_string_to_metric_families(httpx.get(f"{engine.url}/metrics", timeout=30).text)
    return [(one.labels, one.value) for family in families for one in family.samples if one.name == name]


if __name__ == "__main__":
    main()
