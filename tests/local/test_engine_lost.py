"""One of two engines is killed in the middle of its streams: the other carries them on, and no client notices."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from tests.local.conftest import LocalService

MANIFEST = Path(__file__).parents[2] / "examples" / "two-cpu-replicas.yaml"
NUM_STREAMS, NUM_TOKENS = 8, 300


@pytest.fixture
def pair() -> Iterator[LocalService]:
    service = LocalService(MANIFEST)
    try:
        service.wait_ready()
        service.wait_found(2)
        yield service
    finally:
        service.stop()


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
    num_resumed = sum("a stream lost elsewhere goes on" in line for line in pair.lines)
    assert 0 < num_resumed < NUM_STREAMS
