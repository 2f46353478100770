"""Verdict by traffic: a pod is killed whose rank shares every layer with another pod's."""

import signal

import pytest
from e2e.conftest import StartLoad
from e2e.engine_processes import signalling
from e2e.live_cluster import LiveService
from e2e.pod_groups import strike_a_group
from e2e.verdicts import Verdicts

pytestmark = pytest.mark.timeout(600)


@pytest.mark.usefixtures("rig")
def test_streams_outlive_a_pod_that_shared_their_layers(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    strike_a_group(
        "tensor group: SIGKILL of rank 1", "1", signalling(signal.SIGKILL), own_service, start_load, verdicts
    )
