"""Verdict by traffic: one of two routers is killed; the other's streams go on, and who asks again is served."""

import signal
from functools import partial

import pytest
from e2e.conftest import StartLoad
from e2e.live_cluster import LiveService
from e2e.routers import strike_a_router
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts

NUM_TOKENS = 200
SERVED_AGAIN_WITHIN_SECONDS = 10.0


@pytest.mark.usefixtures("rig")
def test_streams_of_the_other_router_go_on_and_who_asks_again_is_served(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    start_clients = partial(start_load, own_service, answers(NUM_TOKENS))
    strike_a_router("router killed", signal.SIGKILL, SERVED_AGAIN_WITHIN_SECONDS, own_service, start_clients, verdicts)
