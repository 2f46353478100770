"""Four minutes with an installation: few clients, many, what fails for a while, few again."""

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import httpx
from e2e.dashboards.installation import NAMESPACE, Installation

from kvasir_operator.api import labels

PREAMBLES = [
    "".join(f"def {name}_{number}(values):\n    return sorted(values)[:{number}]\n\n" for number in range(12))
    for name in ("first", "second", "third", "fourth")
]
"""About 250 tokens each: what prompts share."""
QUIET_SECONDS, BUSY_SECONDS, BETWEEN_FAULTS_SECONDS, LAST_SECONDS = 45.0, 40.0, 20.0, 75.0


@dataclass(frozen=True)
class Client:
    """One request after the other; `pause_seconds` between them."""

    service: str
    model: str
    max_tokens: int
    is_long: bool = True
    is_shared: bool = True
    pause_seconds: float = 0.0

    def bodies(self, seed: int) -> Iterator[dict[str, object]]:
        draw = random.Random(seed)
        for number in count():
            beginning = draw.choice(PREAMBLES) if self.is_shared else f"# {seed} {number}\n{draw.choice(PREAMBLES)}"
            prompt = f"{beginning if self.is_long else ''}# {seed} {number}\nimport os\n"
            yield {
                "model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": True,
                "ignore_eos": True,
            }  # fmt: skip


CHATS = [Client("chat", "kvasir-python", 180)] * 20
RANKS = [Client("ranks", "kvasir-python-700k", 12, pause_seconds=2.0)] * 2
SPLIT = [
    Client("split", "kvasir-python-split", 40, is_shared=False, pause_seconds=0.5),
    Client("split", "kvasir-python-split", 40, pause_seconds=0.5),
    Client("split", "kvasir-python-split", 20, is_long=False, pause_seconds=1.0),
]
UNKNOWN = [Client("split", "nobody", 1, is_long=False, pause_seconds=5.0)]


def run_load(installation: Installation) -> None:
    with clients_of(installation.urls, [*CHATS[:3], *RANKS, *SPLIT, *UNKNOWN]):
        time.sleep(QUIET_SECONDS)
        with clients_of(installation.urls, CHATS):
            time.sleep(BUSY_SECONDS)
            with refused_service(installation):
                for engine in ("chat-serve-0", "ranks-serve-0", "split-prefill-0"):
                    installation.kill(engine)
                    time.sleep(BETWEEN_FAULTS_SECONDS)
        time.sleep(LAST_SECONDS)


@contextmanager
def refused_service(installation: Installation) -> Iterator[None]:
    """One whose Deployment a quota forbids: passes that fail."""
    api, metadata = installation.control_plane, {"name": "beyond-quota", "namespace": NAMESPACE}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"count/deployments.apps": "0"}}}
    service = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "spec": {"model": {"source": "pvc://model"}}}
    api.apply(quota | {"metadata": metadata})
    api.apply(service | {"metadata": metadata})
    try:
        yield
    finally:
        services = f"/apis/{labels.API_VERSION}/namespaces/{NAMESPACE}/{labels.PLURAL}"
        for path in (services, f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"):
            api.request("delete", f"{path}/{metadata['name']}")


@contextmanager
def clients_of(urls: Mapping[str, str], clients: list[Client]) -> Iterator[None]:
    """They ask until the end; `urls` by service. What fails is a panel's business."""
    stop = threading.Event()

    def run(number: int, client: Client) -> None:
        for body in client.bodies(number):
            if stop.is_set():
                return
            with suppress(httpx.HTTPError):
                ask(f"{urls[client.service]}/v1/completions", body, stop)
            stop.wait(client.pause_seconds)

    threads = [threading.Thread(target=run, args=numbered) for numbered in enumerate(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ask(url: str, body: dict[str, object], stop: threading.Event) -> None:
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        for _ in answer.iter_raw():
            if stop.is_set():
                return
