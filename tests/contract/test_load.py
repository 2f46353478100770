"""What an engine answers on /load is what the operator reads there."""

import asyncio

from aiohttp import web

from kvasir_operator.observe.engine_http import read_work
from kvasir_runtime.server.responses import LoadResponse, to_json


def test_the_operator_reads_how_many_requests_an_engine_is_answering() -> None:
    async def load(_: web.Request) -> web.Response:
        answer = LoadResponse(server_load=7, num_requests_running=5, num_requests_waiting=1)
        return web.Response(body=to_json(answer), content_type="application/json")

    async def body() -> dict[str, int]:
        app = web.Application()
        app.router.add_get("/load", load)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            pod = {"metadata": {"name": "engine"}, "status": {"podIP": "127.0.0.1"}}
            return await read_work([pod], runner.addresses[0][1])
        finally:
            await runner.cleanup()

    assert asyncio.run(body()) == {"engine": 7}
