"""What routers say that they hold."""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from kvasir_operator.autoscaling.held import Held, held_in, read_held

TEXT = """# HELP kvasir_router_queued_requests Requests held in the queue.
# TYPE kvasir_router_queued_requests gauge
kvasir_router_queued_requests{service="models/llama",tenant="a"} 2.0
kvasir_router_queued_requests{service="models/llama",tenant="b"} 1.0
kvasir_router_queued_requests{service="models/qwen",tenant=""} 5.0
kvasir_router_queued_tokens{service="models/llama",tenant="a"} 30.0
kvasir_router_queued_tokens{service="models/qwen",tenant=""} 7.0
kvasir_router_requests_total{code="200"} 99.0
"""


def test_a_gateway_holds_for_many_services_and_a_router_of_its_own_for_one() -> None:
    assert held_in(TEXT, "models/llama") == Held(3, 30)
    assert held_in(TEXT, None) == Held(8, 37)
    assert held_in("", None) == Held(0, 0)


async def _answer(_: web.Request) -> web.Response:
    return web.Response(text=TEXT)


def test_routers_that_do_not_answer_are_left_out_and_without_any_nothing_is_known() -> None:
    async def ask() -> tuple[Held | None, Held | None]:
        app = web.Application()
        app.router.add_get("/metrics", _answer)
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        assert server.port is not None
        try:
            some = await read_held(["127.0.0.1", "127.0.0.2"], "models/llama", server.port)
        finally:
            await server.close()
        return some, await read_held(["127.0.0.1"], None, server.port)

    assert asyncio.run(ask()) == (Held(3, 30), None)
