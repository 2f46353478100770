"""Engine pods asked over HTTP how busy they are."""

import asyncio

from aiohttp import web
from tests.operator.cluster_objects import pod

from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.engine_http import read_work

ANSWERS = {
    "127.0.0.1": web.json_response,
    "127.0.0.2": lambda _: web.Response(status=401),
    "127.0.0.3": lambda _: web.Response(text="busy"),
}


async def load(request: web.Request) -> web.StreamResponse:
    return ANSWERS[str(request.url.host)]({"server_load": 7, "num_requests_running": 5, "num_requests_waiting": 2})


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


def asked(pods: list[KubeObject], handler: object = load, **limits: float) -> dict[str, int]:
    """What `read_work` finds where every loopback address answers `/load` by `handler`."""

    async def body() -> dict[str, int]:
        app = web.Application()
        app.router.add_get("/load", handler)  # type: ignore[arg-type]
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "0.0.0.0", 0).start()
            return await read_work(pods, runner.addresses[0][1], **limits)
        finally:
            await runner.cleanup()

    return asyncio.run(body())


def test_pods_that_cannot_tell_are_left_out() -> None:
    pods = [pod(f"e{number}", podIP=f"127.0.0.{number}") for number in (1, 2, 3)]
    assert asked([*pods, pod("without an address yet")]) == {"e1": 7}


def test_a_pod_that_does_not_answer_is_not_waited_for() -> None:
    assert asked([pod("hung", podIP="127.0.0.1")], never, timeout_seconds=0.1) == {}


def test_a_pod_that_is_not_there_is_left_out() -> None:
    assert asyncio.run(read_work([pod("gone", podIP="127.0.0.1"), pod("v6", podIP="::1")], port=9)) == {}
