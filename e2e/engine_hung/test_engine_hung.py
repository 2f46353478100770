"""Verdict by traffic: an engine's processes stop without ending, so that only the lack of progress tells."""

import os
import signal
from collections.abc import Callable

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import all_processes, core_process
from e2e.engines import Engine
from e2e.live_cluster import LiveService
from e2e.recovery import recover
from e2e.verdicts import Verdicts

NUM_ENGINES = 2
SILENCE_LIMIT_SECONDS = 35.0
"""An engine whose port still takes connections may only be busy, so a router gives it 30 s (`--hung-after`)."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("rig")]


def only_core(victim: Engine) -> list[int]:
    return [core_process(victim)]


@pytest.mark.parametrize("processes_of", [all_processes, only_core], ids=["all its processes", "its engine core"])
def test_a_stopped_engine_is_found_and_replaced_and_its_streams_go_on_elsewhere(
    processes_of: Callable[[Engine], list[int]],
    own_service: LiveService,
    start_load: StartLoad,
    verdicts: Verdicts,
    request: pytest.FixtureRequest,
) -> None:
    def stop(victim: Engine) -> None:
        for pid in processes_of(victim):
            os.kill(pid, signal.SIGSTOP)

    recovery = recover(own_service, start_load, stop, NUM_ENGINES)
    verdict, whole_again = recovery.verdict, recovery.whole_again_seconds
    scenario = f"engine hung: SIGSTOP of {request.node.callspec.id}"
    verdicts.add(scenario, verdict, f"{recovery.num_resumed} streams resumed", whole_again=whole_again)
    assert not verdict.failures, verdict
    assert recovery.num_resumed > 0, "the engine was stopped while it had no streams"
    assert verdict.longest_gap_seconds < SILENCE_LIMIT_SECONDS
