"""Fake engines that prefill and decode for each other: what a real side channel would carry is one object's to tell."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from tests.router.conftest import FakeEngine


class SideChannel:
    """By transfer id: whether the prompt's KV is there, or will never be."""

    def __init__(self) -> None:
        self.told: dict[str, asyncio.Future[bool]] = {}
        self.is_mute = False  # a prefill engine that fails has told nobody

    def about(self, transfer_id: str) -> asyncio.Future[bool]:
        return self.told.setdefault(transfer_id, asyncio.get_running_loop().create_future())

    def tell(self, transfer_id: str, *, is_there: bool) -> None:
        if not self.about(transfer_id).done() and (is_there or not self.is_mute):
            self.about(transfer_id).set_result(is_there)


class PrefillEngine(FakeEngine):
    """`blocks` is what it says of where they are, in vLLM's form; None: the id says it."""

    def __init__(self, name: str, channel: SideChannel) -> None:
        super().__init__(name)
        self.num_tokens = 1
        self.blocks: dict[str, Any] | None = None
        self._channel = channel

    async def speak(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        transfer_id = asked["kv_transfer_params"].get("transfer_id", "")
        is_there = False
        try:
            response = await super().speak(request, asked)
            is_there = response.status == 200
        finally:
            self._channel.tell(transfer_id, is_there=is_there)
        if self.blocks is None or not isinstance(response, web.Response):
            return response
        assert isinstance(response.body, bytes)
        return web.json_response(json.loads(response.body) | {"kv_transfer_params": self.blocks})


class DecodeEngine(FakeEngine):
    """Waits `patience_seconds` for KV, then prefills itself; `received` tells what it did, None without a transfer."""

    def __init__(self, name: str, channel: SideChannel) -> None:
        super().__init__(name)
        self.keeps_journal = True
        self.patience_seconds = 0.1
        self.received: list[bool | None] = []
        self._channel = channel

    async def speak(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        self.received.append(await self._receive(asked.get("kv_transfer_params")))
        return await super().speak(request, asked)

    async def _receive(self, params: dict[str, Any] | None) -> bool | None:
        if params is None:
            return None
        if "transfer_id" not in params:
            return True
        try:
            async with asyncio.timeout(self.patience_seconds):
                return await asyncio.shield(self._channel.about(params["transfer_id"]))
        except TimeoutError:
            return False


class Split:
    """Up to two of each role, and a router before them. Engines stop with `exit_stack`."""

    def __init__(self, start_router: Callable[..., Any], exit_stack: AsyncExitStack) -> None:
        self.channel = SideChannel()
        self.prefills = [PrefillEngine(name, self.channel) for name in ("p1", "p2")]
        self.decodes = [DecodeEngine(name, self.channel) for name in ("d1", "d2")]
        self._start_router = start_router
        self._exit_stack = exit_stack

    @property
    def engines(self) -> list[FakeEngine]:
        return [*self.prefills, *self.decodes]

    async def start_engines(
        self, num_prefills: int, num_decodes: int
    ) -> tuple[list[PrefillEngine], list[DecodeEngine]]:
        self.prefills, self.decodes = self.prefills[:num_prefills], self.decodes[:num_decodes]
        for engine in self.engines:
            await engine.start()
            self._exit_stack.push_async_callback(engine.stop)
        return self.prefills, self.decodes

    async def start(self, num_prefills: int = 1, num_decodes: int = 1, **flags: Any) -> Any:
        """`flags` are the router's; by default every prompt is prefilled elsewhere."""
        prefills, decodes = await self.start_engines(num_prefills, num_decodes)
        options: dict[str, Any] = {
            "endpoint": (),
            "prefill_endpoint": tuple(engine.url for engine in prefills),
            "decode_endpoint": tuple(engine.url for engine in decodes),
            "remote_prefill_min_tokens": 0,
        }
        return await self._start_router(*prefills, *decodes, **options | flags)
