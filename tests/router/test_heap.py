"""What the process gives back of its memory."""

import asyncio
import resource
from pathlib import Path
from typing import cast

import pytest

from kvasir_router import heap, server
from kvasir_router.service.services import Services

pytestmark = pytest.mark.anyio


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_memory_of_bodies_goes_back_though_what_came_after_them_stays() -> None:
    held = [b"x" * 100_000 for _ in range(1000)]
    del held[:-1]
    before = resident_bytes()
    heap.return_free_memory()
    assert before - resident_bytes() > 50e6


def test_a_c_library_without_it_is_none_the_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    heap.return_free_memory()


async def test_it_goes_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    is_returned = asyncio.Event()
    monkeypatch.setattr(server, "_HOUSEKEEPING_SECONDS", 0.001)
    monkeypatch.setattr(server, "return_free_memory", is_returned.set)
    housekeeping = asyncio.create_task(server._housekeeping(cast(Services, ()), None))
    async with asyncio.timeout(10):
        await is_returned.wait()
    housekeeping.cancel()
