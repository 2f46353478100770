"""Starting the operator where it cannot start, and stopping one that waits."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.operator.autoscaling.fake_prometheus import FakePrometheus, vector
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.autoscaling.prometheus import Prometheus, PrometheusAccess
from kvasir_operator.errors import KvasirOperatorError
from kvasir_operator.kube.features import ClusterFeatures
from kvasir_operator.kube.leadership import Leadership
from kvasir_operator.kube.lease import LeaderElector, LeaseName, LeaseTiming
from kvasir_operator.run import Operator, run_operator
from kvasir_operator.settings import OperatorSettings

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


def test_an_unreadable_kubeconfig_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(KvasirOperatorError, match=f"address and credentials from {missing}"):
        run_operator(OperatorSettings(kubeconfig=str(missing)))


def test_a_signal_ends_an_operator_that_waits_for_the_api_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)

    async def body() -> None:
        operator = Operator(OperatorSettings(kubeconfig=str(tmp_path / "config"), host="127.0.0.1", port=0))
        running = asyncio.create_task(operator.run())
        while "waiting for the API server" not in caplog.text:  # noqa: ASYNC110, a log has no event
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, timeout=30.0)

    asyncio.run(body())


def test_who_drains_makes_no_lease_anew() -> None:
    async def body() -> None:
        kube, timing = MemoryKube(), LeaseTiming(gone_seconds=0.0)
        elector = LeaderElector(kube, LeaseName("system", "kvasir-operator"), "me", lambda: 0.0, timing)
        operator = Operator(OperatorSettings())
        operator._leadership = Leadership([elector], timing.retry_seconds)
        assert await elector.take()
        await operator._stop_parts()
        kube.objects.clear()
        assert not await elector.take()
        assert kube.objects == {}

    asyncio.run(body())


class Standing(Operator):
    """Whose parts ask Prometheus once, when they are started."""

    def __init__(self, kube: MemoryKube, leadership: Leadership, prometheus: Prometheus) -> None:
        super().__init__(OperatorSettings(prometheus_url="http://prometheus"))
        self._client, self._leadership, self._prometheus = kube, leadership, prometheus  # type: ignore[assignment]
        self.asking: asyncio.Task[object] | None = None

    def _start_parts(self, features: ClusterFeatures) -> None:
        assert self._prometheus is not None
        self.asking = asyncio.create_task(self._prometheus.query("up"))


class CountedElector(LeaderElector):
    num_tries = 0

    async def take(self) -> bool:
        self.num_tries += 1
        return await super().take()


def test_who_stands_by_asks_prometheus_nothing_until_it_leads() -> None:
    async def body() -> None:
        kube, name, timing = MemoryKube(), LeaseName("system", "kvasir-operator"), LeaseTiming(retry_seconds=0.001)
        leader = LeaderElector(kube, name, "leader", lambda: 0.0, timing)
        mine = CountedElector(kube, name, "standby", lambda: 0.0, timing)
        assert await leader.take()
        async with FakePrometheus(lambda _: (vector(), 200)) as server:
            prometheus = Prometheus(PrometheusAccess(server.url))
            standby = Standing(kube, Leadership([mine], timing.retry_seconds), prometheus)
            starting = asyncio.create_task(standby._start())
            while mine.num_tries < 5:  # noqa: ASYNC110, an elector tells nobody of its tries
                await asyncio.sleep(0.001)
            assert (server.asked, standby.asking) == ([], None)
            await leader.release()
            await asyncio.wait_for(starting, timeout=30.0)
            assert standby.asking is not None
            await standby.asking
            assert server.asked == ["up"]
            await prometheus.close()

    asyncio.run(body())
