"""One of two engines is killed in the middle of its streams: the other carries them on, and no client notices."""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import pytest
from tests.local.conftest import LocalService

MANIFEST = Path(__file__).parents[2] / "examples" / "two-cpu-replicas.yaml"
NUM_STREAMS, NUM_TOKENS = 8, 300


@pytest.fixture
def pair() -> Iterator[LocalService]:
    service = LocalService(MANIFEST)
    try:
        service.wait_ready()
        wait_until_routed(service, 2)
        yield service
    finally:
        service.stop()


def wait_until_routed(service: LocalService, num_engines: int) -> None:
    """The router learns of an engine that is ready with its next probe."""
    [command] = [one for one in service.processes().values() if "kvasir-router serve" in one]
    admin = re.search(r"--admin-host (\S+) --admin-port (\d+)", command)
    assert admin is not None, command
    deadline = time.monotonic() + 60
    while f'kvasir_router_endpoints{{state="ready"}} {num_engines}.0' not in httpx.get(
        f"http://{admin[1]}:{admin[2]}/metrics"
    ).text:  # fmt: skip
        assert time.monotonic() < deadline, "".join(service.lines)
        time.sleep(0.1)


def stream(service: LocalService, has_begun: Barrier) -> str:
    """A greedy completion, whole; `has_begun` is waited at after its first token."""
    chunks = service.client().completions.create(
        model="kvasir-python", prompt="import os\n", max_tokens=NUM_TOKENS, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text = next(chunks).choices[0].text
    has_begun.wait(60)
    return text + "".join(chunk.choices[0].text for chunk in chunks)


def engines(service: LocalService) -> set[int]:
    """Their API processes, each the leader of a group."""
    return {pid for pid, command in service.processes().items() if "kvasir-runtime serve" in command}


def test_streams_of_a_killed_engine_end_as_those_of_the_other(pair: LocalService) -> None:
    have_begun = Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        streams = [clients.submit(stream, pair, have_begun) for _ in range(NUM_STREAMS)]
        have_begun.wait(60)
        os.killpg(os.getpgid(min(engines(pair))), signal.SIGKILL)
        texts = Counter(each.result() for each in streams)
    assert list(texts.values()) == [NUM_STREAMS]
    num_resumed = sum("goes on with a stream lost elsewhere" in line for line in pair.lines)
    assert 0 < num_resumed < NUM_STREAMS
