"""The subscriber on docs/reference/kv-events.md follows a real publisher."""

import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir_runtime.config import KvEventsConfig
from kvasir_runtime.engine.router_feed import EventPublisher
from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "kv-events.md").read_text()


@pytest.fixture
def page() -> dict[str, Any]:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[EventPublisher]:
    publisher = EventPublisher(
        KvEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{tmp_path}/events",
            replay_endpoint=f"ipc://{tmp_path}/replay",
            buffer_steps=1,
        )
    )
    yield publisher
    publisher.close()


def test_the_pages_subscriber_learns_what_was_before_it_and_what_comes(
    page: dict[str, Any], publisher: EventPublisher, tmp_path: Path
) -> None:
    publisher.publish_events([AllBlocksCleared(), BlockStored([b"a"], None, [1, 2], 2)])
    publisher.publish_events([BlockStored([b"b"], b"a", [3, 4], 2)])
    events = page["follow"](f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    before = list(itertools.islice(events, 3))
    has_news = threading.Event()

    def publish() -> None:
        while not has_news.wait(0.01):  # until the subscription has arrived as well
            publisher.publish_events([BlockRemoved([b"b"])])

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        after = next(events)
    finally:
        has_news.set()
        thread.join()
        events.close()

    assert [event[:2] for event in before] == [["AllBlocksCleared"], ["BlockStored", [b"a"]], ["BlockStored", [b"b"]]]
    assert after[0] in ("BlockRemoved", "AllBlocksCleared")
