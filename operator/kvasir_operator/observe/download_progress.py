"""How far engine pods are with downloading their model, asked of each over HTTP: `GET /progress` of its loader.

On the engine's port, which network policies let the operator reach; it needs no right on pods, and writes nothing into
the cluster. An answer explains and is never waited for long: a loader that gives none is left out.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import aiohttp

from kvasir_operator.api.labels import ENGINE_HTTP_PORT, ROLE_LABEL
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.model_loader import DownloadProgress, is_downloading
from kvasir_operator.observe.pod_url import pod_url

logger = logging.getLogger(__name__)

ReadDownloads = Callable[[Iterable[KubeObject]], Awaitable[Mapping[str, DownloadProgress]]]
"""Of these pods, by pod name."""
TIMEOUT_SECONDS: Final = 0.5
_MAX_PODS_ASKED: Final = 8
"""Of a role: its pods are alike."""


async def read_downloads(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, DownloadProgress]:
    """Of those whose loader is running, by pod name."""
    addresses = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in _to_ask(pods)}
    if not addresses:
        return {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_seconds)) as session:
        urls = [pod_url(address, port, "/progress") for address in addresses.values()]
        answers = await asyncio.gather(*(_ask(session, url) for url in urls))
    return {name: answer for name, answer in zip(addresses, answers, strict=True) if answer is not None}


def _to_ask(pods: Iterable[KubeObject]) -> list[KubeObject]:
    by_role: dict[str, list[KubeObject]] = {}
    for pod in pods:
        if is_downloading(pod) and pod["status"].get("podIP"):
            by_role.setdefault(pod["metadata"].get("labels", {}).get(ROLE_LABEL, ""), []).append(pod)
    return [pod for alike in by_role.values() for pod in alike[:_MAX_PODS_ASKED]]


async def _ask(session: aiohttp.ClientSession, url: str) -> DownloadProgress | None:
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return DownloadProgress(**await answer.json())
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
        # Between two loaders of a pod, and while one starts or ends, nobody listens.
        logger.debug("%s did not say how far it is: %r", url, error)
        return None
