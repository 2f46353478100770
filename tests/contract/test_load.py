"""What an engine answers on /load is what the operator reads there."""

import asyncio

from aiohttp import web

from kvasir_operator.observe.engine_http import read_contexts, read_work
from kvasir_operator.observe.replicas import EngineContext
from kvasir_runtime.server.responses import LoadResponse, to_json


def test_the_operator_reads_what_an_engine_is_answering_and_its_context() -> None:
    async def load(_: web.Request) -> web.Response:
        answer = LoadResponse(server_load=7, num_requests_running=5, max_model_len=8192, max_model_len_cut_from=40960)
        return web.Response(body=to_json(answer), content_type="application/json")

    async def body() -> tuple[dict[str, int], dict[str, EngineContext]]:
        app = web.Application()
        app.router.add_get("/load", load)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            pod = {"metadata": {"name": "engine"}, "status": {"podIP": "127.0.0.1"}}
            port = runner.addresses[0][1]
            return await read_work([pod], port), await read_contexts([pod], port)
        finally:
            await runner.cleanup()

    assert asyncio.run(body()) == ({"engine": 7}, {"engine": EngineContext(8192, 40960)})
