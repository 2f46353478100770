"""Verdict by traffic: what eight streaming clients saw while one of two engines was killed."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
from tests.local.conftest import LocalService

MANIFEST = Path(__file__).parents[2] / "examples" / "two-cpu-replicas.yaml"
NUM_CLIENTS = 8
NUM_TOKENS = 200


class Client(threading.Thread):
    """Streams the same greedy completion again and again, and notes how each one ended."""

    def __init__(self, service: LocalService, model: str) -> None:
        super().__init__()
        self._client, self._model = service.client(), model
        self.is_stopping = threading.Event()
        self.texts: list[str] = []
        self.num_cut = 0

    def run(self) -> None:
        while not self.is_stopping.is_set():
            try:
                stream = self._client.completions.create(
                    model=self._model, prompt="import os\n", max_tokens=NUM_TOKENS, temperature=0, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                self.texts.append("".join(chunk.choices[0].text for chunk in stream))
            except (openai.APIError, httpx.TransportError):
                self.num_cut += 1


def engines(service: LocalService) -> set[int]:
    return {pid for pid, command in service.processes().items() if "kvasir-runtime serve" in command}


def test_only_the_killed_engines_streams_are_cut():
    service = LocalService(MANIFEST)
    clients: list[Client] = []
    try:
        service.wait_ready()
        model = service.client().models.list().data[0].id
        clients = [Client(service, model) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        wait_until(lambda: all(client.texts for client in clients))
        victim = min(before := engines(service))
        killed_at = time.monotonic()
        os.killpg(os.getpgid(victim), signal.SIGKILL)
        wait_until(lambda: len(engines(service) - {victim}) >= len(before))
        restarted_after = time.monotonic() - killed_at
        seen = [len(client.texts) for client in clients]
        wait_until(lambda: all(len(client.texts) >= count + 2 for client, count in zip(clients, seen, strict=True)))
    finally:
        for client in clients:
            client.is_stopping.set()
        for client in clients:
            client.join()
        service.stop()
    num_cut = sum(client.num_cut for client in clients)
    texts = {text for client in clients for text in client.texts}
    num_whole = sum(len(client.texts) for client in clients)
    print(f"\n{num_whole} whole streams, {num_cut} cut; a new engine process after {restarted_after:.1f} s")
    assert num_cut <= NUM_CLIENTS
    assert len(texts) == 1, "every whole stream has the same text, whichever engine gave it"


def wait_until(condition: Callable[[], bool], limit_seconds: float = 180) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.2)
