"""Verdict by traffic on real pods: an engine's process is killed, or its pod is deleted without grace."""

import os
import signal
from collections.abc import Callable

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import core_process, main_process
from e2e.engines import Engine
from e2e.live_cluster import LiveService
from e2e.recovery import Recovery, recover
from e2e.traffic.json_requests import REQUESTS, json_request
from e2e.verdicts import Verdicts

NUM_ENGINES = 2
SILENCE_LIMIT_SECONDS = 5.0

pytestmark = pytest.mark.timeout(600)


@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("process_of", [main_process, core_process], ids=["main process", "engine core"])
def test_streams_outlive_a_killed_process(
    process_of: Callable[[Engine], int],
    own_service: LiveService,
    start_load: StartLoad,
    verdicts: Verdicts,
    request: pytest.FixtureRequest,
) -> None:
    def kill(victim: Engine) -> None:
        os.kill(process_of(victim), signal.SIGKILL)

    recovery = recover(own_service, start_load, kill, NUM_ENGINES)
    judge(recovery, f"engine killed: SIGKILL of its {request.node.callspec.id}", verdicts)


@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("name", REQUESTS)
def test_streams_of_other_apis_outlive_a_killed_engine_core(
    name: str, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    """Calls of tools and answers by a schema, whose grammar the other engine goes on with."""
    with own_service.port_forward() as url:
        request = json_request(name, url, own_service.model)

    def kill(victim: Engine) -> None:
        os.kill(core_process(victim), signal.SIGKILL)

    judge(recover(own_service, start_load, kill, NUM_ENGINES, [request]), f"engine killed: {name}", verdicts)


def test_streams_outlive_a_pod_deleted_without_grace(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    def delete(victim: Engine) -> None:
        namespace = f"--namespace={own_service.namespace}"
        own_service.cluster.kubectl("delete", "pod", victim.pod, namespace, "--force", "--grace-period=0")

    judge(recover(own_service, start_load, delete, NUM_ENGINES), "engine killed: pod deleted without grace", verdicts)


def judge(recovery: Recovery, scenario: str, verdicts: Verdicts) -> None:
    verdict, whole_again = recovery.verdict, recovery.whole_again_seconds
    verdicts.add(scenario, verdict, f"{recovery.num_resumed} streams resumed", whole_again=whole_again)
    assert not verdict.failures, verdict
    assert recovery.num_resumed > 0, "the engine was killed while it had no streams"
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS
