"""Verdict by traffic: who goes on sending to a router that drains is served."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, name_of, uid_of
from e2e.routers import IN_FLIGHT
from e2e.traffic.answers import answers
from e2e.traffic.traffic import CLIENT, Outcome, Verdict
from e2e.verdicts import Verdicts
from e2e.watch import watching
from tests.controlplane.processes import wait_until

NUM_CLIENTS, NUM_TOKENS = 8, 100
SENDS_ON_SECONDS = 15.0
DRAIN_TIMEOUT_SECONDS = 60.0


def test_no_stream_of_a_port_forward_fails_while_its_router_drains(
    own_service: LiveService, verdicts: Verdicts, tmp_path: Path
) -> None:
    with own_service.port_forward() as url, watching(own_service.cluster, "pods", own_service.namespace) as pods:
        plan = {"url": url, "model": own_service.model, "num_clients": NUM_CLIENTS, "headers": {}, "is_salted": False}
        plan["streams"] = [dataclasses.asdict(answer) for answer in answers(NUM_TOKENS)]
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, str(CLIENT), str(tmp_path / "plan.json")]
        with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log) as clients:
            try:
                router = wait_until(lambda: busy_router(own_service), 60, "a router with streams", POLL_SECONDS)
                wait_until(lambda: len(outcomes(tmp_path)) >= NUM_CLIENTS, 60, "whole streams", POLL_SECONDS)
                told = time.time()
                own_service.tell_to_go(name_of(router))
                time.sleep(SENDS_ON_SECONDS)  # the scenario itself
            finally:
                clients.terminate()
        gone = pods.first(lambda state: uid_of(router) not in state, 120, f"{name_of(router)} to go", after=told)
    verdict = Verdict(tuple(outcomes(tmp_path)))
    late = sum(each.started > told + SENDS_ON_SECONDS / 2 for each in verdict.outcomes)
    verdicts.add("drain behind a port-forward", verdict, f"{late} streams began late", gone=gone - told)
    assert not verdict.failures, verdict
    assert late > 0
    assert gone - told < DRAIN_TIMEOUT_SECONDS


def busy_router(service: LiveService) -> KubeObject | None:
    return next((pod for pod in service.pods("router") if service.metric(pod, IN_FLIGHT) > 0), None)


def outcomes(folder: Path) -> list[Outcome]:
    """The streams that have ended so far."""
    return [Outcome(**json.loads(line)) for line in (folder / "log").read_text().splitlines() if line.startswith("{")]
