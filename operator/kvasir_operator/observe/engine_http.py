"""Pods asked over HTTP: how busy engines are (`GET /load`), and how far their loaders have come (`GET /progress`).

Both on the engine's port, which network policies let the operator reach; it needs no right on pods, and writes nothing
into the cluster. An answer helps to choose or to explain and is never waited for long: a pod that is slow to answer, or
cannot be reached, is left out.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

import aiohttp

from kvasir_operator.api.labels import ENGINE_HTTP_PORT
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.model_loader import DownloadProgress, is_downloading
from kvasir_operator.observe.pod_events import some_of_each_role

logger = logging.getLogger(__name__)

Told = TypeVar("Told")
ReadDownloads = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, DownloadProgress]]]
"""Of these pods, by pod name."""
_WORK_TIMEOUT_SECONDS: Final = 2.0
_DOWNLOAD_TIMEOUT_SECONDS: Final = 0.5
_MAX_PODS_ASKED: Final = 8
"""Of a role, for their downloads: its pods are alike."""


async def read_work(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = _WORK_TIMEOUT_SECONDS
) -> dict[str, int]:
    """Requests that each pod is answering, by pod name."""

    async def told(answer: aiohttp.ClientResponse) -> int:
        return int((await answer.json())["server_load"])

    return await _ask_pods(pods, port, "/load", told, timeout_seconds, logging.WARNING)


async def read_downloads(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = _DOWNLOAD_TIMEOUT_SECONDS
) -> dict[str, DownloadProgress]:
    """Of those whose loader is running, by pod name."""

    async def told(answer: aiohttp.ClientResponse) -> DownloadProgress:
        return DownloadProgress(**await answer.json())

    downloading = (pod for pod in pods if is_downloading(pod) and pod["status"].get("podIP"))
    asked = some_of_each_role(downloading, _MAX_PODS_ASKED)
    # Between two loaders of a pod, and while one starts or ends, nobody listens: that is worth no warning.
    return await _ask_pods(asked, port, "/progress", told, timeout_seconds, logging.DEBUG)


async def _ask_pods(
    pods: Iterable[KubeObject],
    port: int,
    path: str,
    told: Callable[[aiohttp.ClientResponse], Awaitable[Told]],
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
    told: Callable[[aiohttp.ClientResponse], Awaitable[Told]],
    timeout_seconds: float,
    level: int = logging.DEBUG,
) -> list[Told | None]:
    """What `told` reads of each one's answer; None of one that gives none. `addresses`: of pods, IPv4 or IPv6."""
    hosts = [f"[{address}]" if ":" in address else address for address in addresses]
    if not hosts:
        return []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_seconds)) as session:
        return await asyncio.gather(*(_ask(session, f"http://{host}:{port}{path}", told, level) for host in hosts))


async def _ask(
    session: aiohttp.ClientSession, url: str, told: Callable[[aiohttp.ClientResponse], Awaitable[Told]], level: int
) -> Told | None:
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return await told(answer)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        logger.log(level, "%s does not tell: %r", url, error)
        return None
