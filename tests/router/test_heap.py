"""What the process gives back of its memory."""

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest

from kvasir_router import server

pytestmark = pytest.mark.anyio


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_the_memory_of_bodies_goes_back_now_and_then_though_what_came_after_them_stays(
    start_router: Any, engine: Any, until: Any
) -> None:
    await start_router(engine, tuned={"housekeeping_seconds": 0.001})
    held = [b"x" * 100_000 for _ in range(1000)]
    del held[:-1]
    before = resident_bytes()
    await until(lambda: before - resident_bytes() > 50e6)


def test_a_c_library_without_it_is_none_the_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    server.return_free_memory()
