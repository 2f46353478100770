"""Loaders asked over HTTP how far they are."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web
from tests.operator.cluster_objects import pod
from tests.operator.observe.test_model_loader import DOWNLOADING, RUNNING

from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.engine_http import read_downloads
from kvasir_operator.observe.model_loader import DownloadProgress

ANSWERS: dict[str, Callable[[], web.Response]] = {
    "127.0.0.1": lambda: web.json_response(asdict(DOWNLOADING)),
    "127.0.0.2": lambda: web.Response(status=404),
    "127.0.0.3": lambda: web.Response(text="busy"),
    "127.0.0.4": lambda: web.json_response({"bytes_done": 1}),
}


def loading(name: str, address: str | None) -> KubeObject:
    found = pod(name, ready=False, initContainerStatuses=[RUNNING])
    found["status"] |= {} if address is None else {"podIP": address}
    return found


def asked(pods: list[KubeObject], **limits: float) -> tuple[dict[str, DownloadProgress], list[str]]:
    """What `read_downloads` finds, and which addresses it asked."""
    hosts: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        hosts.append(str(request.url.host))
        if hosts[-1] not in ANSWERS:
            await asyncio.Event().wait()
        return ANSWERS[hosts[-1]]()

    async def body() -> dict[str, DownloadProgress]:
        app = web.Application()
        app.router.add_get("/progress", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "0.0.0.0", 0).start()
            return await read_downloads(pods, runner.addresses[0][1], **limits)
        finally:
            await runner.cleanup()

    return asyncio.run(body()), hosts


def test_those_that_cannot_tell_are_left_out() -> None:
    found, _ = asked([*(loading(f"e{number}", f"127.0.0.{number}") for number in (1, 2, 3, 4)), loading("new", None)])
    assert found == {"e1": DOWNLOADING}


def test_one_that_does_not_answer_is_not_waited_for() -> None:
    found, hosts = asked([loading("hung", "127.0.0.9")], timeout_seconds=0.1)
    assert (found, hosts) == ({}, ["127.0.0.9"])


def test_pods_that_download_nothing_are_not_asked() -> None:
    engine = pod("a", podIP="127.0.0.1")
    assert asked([engine]) == ({}, [])


def test_of_many_that_are_alike_some_are_asked() -> None:
    _, hosts = asked([loading(f"e{number}", "127.0.0.1") for number in range(20)])
    assert len(hosts) == 8
