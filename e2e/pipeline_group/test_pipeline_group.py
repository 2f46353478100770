"""Verdict by traffic: a pod of a group is killed, stopped or drained; groups of a new revision come, and one goes."""

import signal

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import signalling
from e2e.engines import telling_to_go
from e2e.live_cluster import LiveService
from e2e.pod_groups import scale_groups, strike_a_group, update_groups
from e2e.verdicts import Verdicts

SCENARIO = "pipeline group"
RANKS = pytest.mark.parametrize("rank", ["0", "1"], ids=["the first pod", "the second pod"])

pytestmark = pytest.mark.timeout(600)


@RANKS
@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_a_pod_of_their_group(
    rank: str, number: signal.Signals, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    strike_a_group(
        f"{SCENARIO}: {number.name} of rank {rank}", rank, signalling(number), own_service, start_load, verdicts
    )


@RANKS
def test_a_pod_that_is_told_to_go_takes_its_group_along_and_no_stream(
    rank: str, own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    scenario, strike = f"{SCENARIO}: rank {rank} drained", telling_to_go(own_service)
    strike_a_group(scenario, rank, strike, own_service, start_load, verdicts)


def test_an_update_replaces_whole_groups(own_service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    update_groups(SCENARIO, own_service, start_load, verdicts)


def test_fewer_replicas_take_a_whole_group_along_and_no_stream(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    scale_groups(SCENARIO, own_service, start_load, verdicts)
