import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

from kvasir_router.endpoints.address import Address
from kvasir_router.endpoints.kubernetes import KubernetesSource, ServiceReference
from kvasir_router.endpoints.reflector import ResourceExpiredError, WatchFailedError
from kvasir_router.endpoints.slices import EndpointSlice
from kvasir_router.errors import ConfigError


def endpoint(ip: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": f"uid-{ip}"}}


def endpoint_slice(name: str, version: int, *endpoints: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


def urls(published: frozenset[Address]) -> list[str]:
    return sorted(address.url for address in published)


def test_service_reference() -> None:
    assert ServiceReference.parse("models/llama:http") == ServiceReference("models", "llama", "http")
    with pytest.raises(ConfigError, match="NAMESPACE/NAME:PORT"):
        ServiceReference.parse("llama:8000")


class RecordedApi:
    """Plays lists and watches in order; an exception in a watch is raised there. Then it is silent."""

    def __init__(self, lists: list[tuple[list[EndpointSlice], str]], watches: list[list[Any]]) -> None:
        self.lists = lists
        self.watches = watches
        self.watched_from: list[str] = []

    async def list(self) -> tuple[list[EndpointSlice], str]:
        if not self.lists:
            raise WatchFailedError("the API server is away")
        return self.lists.pop(0)

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        self.watched_from.append(resource_version)
        if not self.watches:
            await asyncio.Event().wait()
        for event in self.watches.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event


Until = Callable[[Callable[[], bool]], Awaitable[None]]


async def followed(api: RecordedApi, count: int, until: Until) -> list[list[str]]:
    """The first `count` sets of URLs that a source publishes, once it waits for more."""
    published: list[list[str]] = []
    source = KubernetesSource(api, "8000", retry_seconds=0.001)
    task = asyncio.create_task(source.run(lambda addresses: published.append(urls(addresses))))
    await until(lambda: len(published) >= count and not api.watches)
    task.cancel()
    assert source.is_synced
    return published


@pytest.mark.anyio
async def test_follows_added_changed_and_deleted_slices(until: Until) -> None:
    events = [
        {"type": "ADDED", "object": endpoint_slice("s2", 11, endpoint("10.0.0.2"))},
        {"type": "MODIFIED", "object": endpoint_slice("s2", 12, endpoint("10.0.0.2", terminating=True))},
        {"type": "DELETED", "object": endpoint_slice("s1", 13)},
    ]
    api = RecordedApi([([endpoint_slice("s1", 1, endpoint("10.0.0.1"))], "10")], [events])
    published = await followed(api, 4, until)
    one, two = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
    assert published == [[one], [one, two], [one], []]


@pytest.mark.anyio
async def test_a_weight_that_is_no_percentage_is_named_in_the_log(until: Until, caplog: Any) -> None:
    broken = endpoint_slice("s", 1, endpoint("10.0.0.1"))
    broken["metadata"]["labels"] = {"serving.kvasir.dev/traffic-weight": "ten"}
    await followed(RecordedApi([([broken], "10")], []), 1, until)
    assert "EndpointSlice s: serving.kvasir.dev/traffic-weight is ignored" in caplog.text


@pytest.mark.anyio
async def test_a_watch_that_ends_goes_on_from_the_last_version_seen(until: Until) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "42"}}}
    api = RecordedApi([([], "10")], [[bookmark], []])
    await followed(api, 1, until)
    await until(lambda: len(api.watched_from) >= 2)
    assert api.watched_from[:2] == ["10", "42"]


@pytest.mark.anyio
async def test_lists_again_when_the_version_has_expired(until: Until) -> None:
    lists: list[tuple[list[EndpointSlice], str]] = [
        ([endpoint_slice("s1", 1, endpoint("10.0.0.1"))], "10"),
        ([endpoint_slice("s9", 9, endpoint("10.0.0.9"))], "90"),
    ]
    published = await followed(RecordedApi(lists, [[ResourceExpiredError("410 Gone")]]), 2, until)
    assert published == [["http://10.0.0.1:8000"], ["http://10.0.0.9:8000"]]


@pytest.mark.anyio
async def test_watches_that_end_at_once_are_not_begun_without_a_pause() -> None:
    api = RecordedApi([([], "10")], [[] for _ in range(50)])
    source = KubernetesSource(api, "8000", retry_seconds=60.0)
    task = asyncio.create_task(source.run(lambda addresses: None))
    for _ in range(200):
        await asyncio.sleep(0)
    task.cancel()
    assert api.watched_from == ["10"]


@pytest.mark.anyio
async def test_an_api_server_that_is_away_takes_no_endpoint_away(until: Until) -> None:
    api = RecordedApi([([endpoint_slice("s1", 1, endpoint("10.0.0.1"))], "10")], [[WatchFailedError("broken")]])
    published = await followed(api, 1, until)
    assert published == [["http://10.0.0.1:8000"]]
