"""Verdict by traffic: what eight streaming clients saw while one of two engines was killed, or stopped."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.local.conftest import LocalService

MANIFEST = Path(__file__).parents[2] / "examples" / "two-cpu-replicas.yaml"
NUM_CLIENTS = 8
NUM_TOKENS = 200


class Client(threading.Thread):
    """Streams the same greedy completion again and again, and notes how each one ended and its longest pause."""

    def __init__(self, service: LocalService, model: str) -> None:
        super().__init__()
        self._client, self._model = service.client(), model
        self.is_stopping = threading.Event()
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.longest_pause = 0.0

    def run(self) -> None:
        while not self.is_stopping.is_set():
            try:
                self.texts.append("".join(self._stream()))
            except (openai.APIError, httpx.TransportError) as error:
                self.errors.append(repr(error))

    def _stream(self) -> Iterator[str]:
        last = time.monotonic()
        stream = self._client.completions.create(
            model=self._model, prompt="import os\n", max_tokens=NUM_TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for chunk in stream:
            self.longest_pause = max(self.longest_pause, time.monotonic() - last)
            last = time.monotonic()
            yield chunk.choices[0].text


def engines(service: LocalService) -> set[int]:
    """The engines' API processes, each the leader of a group."""
    return {pid for pid, command in service.processes().items() if "kvasir-runtime serve" in command}


def core_of(engine: int) -> int:
    """Its child that has torch mapped."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return next(int(pid) for pid in children if "libtorch" in Path(f"/proc/{pid}/maps").read_text())


def kill(engine: int) -> None:
    os.killpg(os.getpgid(engine), signal.SIGKILL)


def kill_core(engine: int) -> None:
    os.kill(core_of(engine), signal.SIGKILL)


def end_its_drain(engine: int) -> None:
    """The second signal gives up what is in flight, as the end of the time to drain does."""
    os.kill(engine, signal.SIGTERM)
    os.kill(engine, signal.SIGINT)


def stop(engine: int) -> None:
    os.killpg(os.getpgid(engine), signal.SIGSTOP)


def stop_core(engine: int) -> None:
    os.kill(core_of(engine), signal.SIGSTOP)


@pytest.mark.parametrize("harm", [kill, kill_core, end_its_drain, stop, stop_core], ids=lambda harm: harm.__name__)
def test_no_stream_is_lost_with_its_engine(harm: Callable[[int], None]):
    service = LocalService(MANIFEST)
    clients: list[Client] = []
    try:
        service.wait_ready()
        model = service.client().models.list().data[0].id
        clients = [Client(service, model) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        wait_until(lambda: all(client.texts for client in clients))
        for client in clients:
            client.longest_pause = 0.0
        victim = min(before := engines(service))
        harmed_at = time.monotonic()
        harm(victim)
        wait_until(lambda: len(engines(service) - {victim}) >= len(before))
        restarted_after = time.monotonic() - harmed_at
        seen = [len(client.texts) for client in clients]
        wait_until(lambda: all(len(client.texts) >= count + 2 for client, count in zip(clients, seen, strict=True)))
    finally:
        for client in clients:
            client.is_stopping.set()
        for client in clients:
            client.join()
        service.stop()
    errors = [error for client in clients for error in client.errors]
    texts = {text for client in clients for text in client.texts}
    num_whole = sum(len(client.texts) for client in clients)
    pause = max(client.longest_pause for client in clients)
    num_resumed = sum("goes on with a stream lost elsewhere" in line for line in service.lines)
    print(
        f"\n{harm.__name__}: {num_whole} whole streams, {len(errors)} cut, {num_resumed} resumed, longest pause "
        f"{pause:.1f} s; a new engine process after {restarted_after:.1f} s"
    )
    assert errors == []
    assert len(texts) == 1, "every stream has the same text, whichever engines gave it"
    assert num_resumed > 0
    assert pause < 10


def wait_until(condition: Callable[[], bool], limit_seconds: float = 180) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.2)
