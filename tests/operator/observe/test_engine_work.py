"""Engine pods asked over HTTP how busy they are, and what context they have."""

import asyncio
from collections.abc import Iterable

from aiohttp import web
from tests.operator.cluster_objects import pod

from kvasir_operator.kube.kinds import KubeObject, ServiceKey
from kvasir_operator.observe.engine_http import SeenContexts, read_work
from kvasir_operator.observe.replicas import EngineContext

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


KEY = ServiceKey("models", "llama")
CUT = EngineContext(8192, cut_from=40960)


class Engines:
    """Each tells the context that stands here; `asked`: who was, in order."""

    def __init__(self, **contexts: EngineContext) -> None:
        self.contexts = contexts
        self.asked: list[str] = []
        self.now = 0.0
        self.seen = SeenContexts(self._read, lambda: self.now)

    async def _read(self, pods: Iterable[KubeObject]) -> dict[str, EngineContext]:
        names = [each["metadata"]["name"] for each in pods]
        self.asked += names
        return {name: self.contexts[name] for name in names if name in self.contexts}

    def shortest_cut(self, *pods: KubeObject) -> EngineContext | None:
        return asyncio.run(self.seen.shortest_cut(KEY, pods))


def restarted(name: str) -> KubeObject:
    return pod(name, containerStatuses=[{"name": "engine", "restartCount": 1, "ready": True}])


def test_the_shortest_context_counts_of_those_that_are_cut() -> None:
    engines = Engines(a=EngineContext(4096), b=CUT, c=EngineContext(16384, 40960))
    assert engines.shortest_cut(pod("a")) is None
    assert engines.shortest_cut(pod("a"), pod("c")) == EngineContext(16384, 40960)
    assert engines.shortest_cut(pod("a"), pod("b"), pod("c")) == CUT


def test_an_engine_is_asked_once_each_time_that_it_starts() -> None:
    engines = Engines(a=CUT)
    for engine in pod("a"), pod("a"), restarted("a"), restarted("a"):
        assert engines.shortest_cut(engine) == CUT
    assert engines.asked == ["a", "a"]
    assert engines.shortest_cut() is None


def test_one_that_does_not_tell_is_asked_again_in_a_while() -> None:
    engines = Engines()
    for engines.now in (0.0, 30.0, 61.0):
        assert engines.shortest_cut(pod("old")) is None
    assert engines.asked == ["old", "old"]


def test_only_ready_engines_are_asked() -> None:
    engines = Engines()
    engines.shortest_cut(pod("a", ready=False), pod("r", role="router"))
    assert engines.asked == []
