"""Starting the operator where it cannot start, and stopping one that waits."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KvasirOperatorError
from kvasir_operator.kube.kinds import NamespacedName
from kvasir_operator.kube.leadership import Leadership
from kvasir_operator.kube.lease import LeaderElector, LeaseTiming
from kvasir_operator.parts import Parts
from kvasir_operator.queue.work_queue import WorkQueue
from kvasir_operator.run import Operator, drain, run_operator
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
        elector = LeaderElector(kube, NamespacedName("system", "kvasir-operator"), "me", lambda: 0.0, timing)
        leadership = Leadership([elector], timing.retry_seconds)
        await leadership.acquire()
        kube.objects.clear()
        await drain(leadership, WorkQueue(lambda: 0.0), Parts(lambda error: None), ())
        assert not await elector.take()
        assert kube.objects == {}

    asyncio.run(body())
