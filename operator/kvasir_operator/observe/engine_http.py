"""Pods asked over HTTP: how busy engines are and what context they have (`GET /load`), and how far their loaders have
come (`GET /progress`).

Both on the engine's port, which network policies let the operator reach; it needs no right on pods, and writes nothing
into the cluster. An answer helps to choose or to explain and is never waited for long: a pod that is slow to answer, or
cannot be reached, is left out.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import inf
from typing import Final, TypeVar

import aiohttp

from kvasir_operator.api.labels import ENGINE_HTTP_PORT, ENGINE_ROLES, ROLE_LABEL
from kvasir_operator.kube.kinds import KubeObject, ServiceKey, label_of
from kvasir_operator.observe.containers import num_restarts, own_containers
from kvasir_operator.observe.model_loader import DownloadProgress, is_downloading
from kvasir_operator.observe.pod_events import some_of_each_role
from kvasir_operator.observe.replicas import EngineContext, replicas_of

logger = logging.getLogger(__name__)

Told = TypeVar("Told")
ReadDownloads = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, DownloadProgress]]]
"""Of these pods, by pod name."""
_WORK_TIMEOUT_SECONDS: Final = 2.0
_SHORT_TIMEOUT_SECONDS: Final = 0.5
"""Where the answer only explains."""
_MAX_PODS_ASKED: Final = 8
"""Of a role, for what explains: its pods are alike."""
_ASK_AGAIN_SECONDS: Final = 60.0
"""An engine that did not tell its context."""


async def read_work(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = _WORK_TIMEOUT_SECONDS
) -> dict[str, int]:
    """Requests that each pod is answering, by pod name."""
    return await _ask_pods(pods, port, "/load", _num_requests, timeout_seconds, logging.WARNING)


async def read_downloads(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = _SHORT_TIMEOUT_SECONDS
) -> dict[str, DownloadProgress]:
    """Of those whose loader is running, by pod name."""
    downloading = (pod for pod in pods if is_downloading(pod) and pod["status"].get("podIP"))
    asked = some_of_each_role(downloading, _MAX_PODS_ASKED)
    # Between two loaders of a pod, and while one starts or ends, nobody listens: that is worth no warning.
    return await _ask_pods(asked, port, "/progress", _progress, timeout_seconds, logging.DEBUG)


ReadContexts = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, EngineContext]]]
"""Of these pods, by pod name."""


async def read_contexts(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = _SHORT_TIMEOUT_SECONDS
) -> dict[str, EngineContext]:
    return await _ask_pods(pods, port, "/load", _context, timeout_seconds, logging.DEBUG)


class SeenContexts:
    """Contexts of services' engines, asked once of each: it is settled when a container starts."""

    def __init__(self, read: ReadContexts, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._read = read
        self._clock = clock
        self._seen: dict[ServiceKey, dict[tuple[str, int], tuple[EngineContext | None, float]]] = {}
        """By a container's pod and restarts: its context, and when to ask for it again."""

    async def shortest_cut(self, key: ServiceKey, pods: Iterable[KubeObject]) -> EngineContext | None:
        """Of the engines that are ready; None where none is cut."""
        leaders = [each.leader for each in replicas_of(pods) if each.is_ready and each.leader is not None]
        engines = [pod for pod in leaders if label_of(pod, ROLE_LABEL) in ENGINE_ROLES]
        before, now = self._seen.get(key, {}), self._clock()
        seen = {start: before[start] for pod in engines if (start := _start_of(pod)) in before}
        asked = some_of_each_role(
            (pod for pod in engines if seen.get(_start_of(pod), (None, now))[1] <= now), _MAX_PODS_ASKED
        )
        contexts = await self._read(asked) if asked else {}
        for pod in asked:
            context = contexts.get(pod["metadata"]["name"])
            seen[_start_of(pod)] = context, now + _ASK_AGAIN_SECONDS if context is None else inf
        self._seen[key] = seen
        cut = [context for context, _ in seen.values() if context is not None and context.cut_from is not None]
        return min(cut, key=lambda context: context.num_tokens, default=None)

    def forget(self, key: ServiceKey) -> None:
        self._seen.pop(key, None)


def _num_requests(load: str) -> int:
    return int(json.loads(load)["server_load"])


def _context(text: str) -> EngineContext:
    load = json.loads(text)
    return EngineContext(load["max_model_len"], load.get("max_model_len_cut_from"))


def _progress(text: str) -> DownloadProgress:
    return DownloadProgress(**json.loads(text))


def _start_of(pod: KubeObject) -> tuple[str, int]:
    return pod["metadata"]["uid"], num_restarts(own_containers(pod))


async def _ask_pods(
    pods: Iterable[KubeObject],
    port: int,
    path: str,
    told: Callable[[str], Told],
    timeout_seconds: float,
    level: int,
) -> dict[str, Told]:
    addresses = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in pods if pod["status"].get("podIP")}
    answers = await ask_each(addresses.values(), port, path, told, timeout_seconds, level)
    return {name: answer for name, answer in zip(addresses, answers, strict=True) if answer is not None}


async def ask_each(
    addresses: Iterable[str],
    port: int,
    path: str,
    told: Callable[[str], Told],
    timeout_seconds: float,
    level: int = logging.DEBUG,
) -> list[Told | None]:
    """What `told` reads of each one's answer; None of one that gives none. `addresses`: of pods, IPv4 or IPv6."""
    hosts = [f"[{address}]" if ":" in address else address for address in addresses]
    if not hosts:
        return []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_seconds)) as session:
        return await asyncio.gather(*(_ask(session, f"http://{host}:{port}{path}", told, level) for host in hosts))


async def _ask(session: aiohttp.ClientSession, url: str, told: Callable[[str], Told], level: int) -> Told | None:
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return told(await answer.text())
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        logger.log(level, "%s does not tell: %r", url, error)
        return None
