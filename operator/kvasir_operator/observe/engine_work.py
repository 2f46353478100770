"""How busy engine pods are, asked of each over HTTP: `GET /load`.

The answer helps to choose and is never waited for: a pod that is slow to answer, or cannot be reached, is left out.
"""

import asyncio
import logging
from collections.abc import Iterable

import aiohttp

from kvasir_operator.api.labels import ENGINE_HTTP_PORT
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.pod_url import pod_url

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0


async def read_work(
    pods: Iterable[KubeObject], port: int = ENGINE_HTTP_PORT, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, int]:
    """Requests that each pod is answering, by pod name."""
    addresses = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in pods if pod["status"].get("podIP")}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_seconds)) as session:
        answers = await asyncio.gather(*(_load(session, pod_url(host, port, "/load")) for host in addresses.values()))
    return {name: load for name, load in zip(addresses, answers, strict=True) if load is not None}


async def _load(session: aiohttp.ClientSession, url: str) -> int | None:
    try:
        async with session.get(url) as answer:
            answer.raise_for_status()
            return int((await answer.json())["server_load"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s did not report its load: %r", url, error)
        return None
