"""Verdict by pods and by traffic: an operator whose clock goes ahead makes a group anew once."""

import json
import shutil
import signal
import time
from collections.abc import Iterator

import pytest
from e2e.cluster.rig.debian import unpacked
from e2e.cluster.rig.layout import MODELS
from e2e.conftest import StartLoad
from e2e.engine_processes import signalling
from e2e.live_cluster import SYSTEM, LiveCluster, LiveService, role_of
from e2e.pod_groups import NUM_GROUPS, NUM_NODES, strike_a_group
from e2e.verdicts import Verdicts
from e2e.watch import watching

OPERATOR = "deployment/kvasir-operator"
AHEAD_SECONDS = 20
LIBRARY, IN_PODS = "libfaketime.so.1", "/clock"
ENV = {"LD_PRELOAD": f"{IN_PODS}/{LIBRARY}", "FAKETIME": f"+{AHEAD_SECONDS}s", "DONT_FAKE_MONOTONIC": "1"}


@pytest.fixture
def clock_ahead(rig: None, own_service: LiveService, live_cluster: LiveCluster) -> Iterator[None]:
    folder = MODELS / "clock"
    folder.mkdir(exist_ok=True)
    [library] = unpacked("libfaketime").parent.glob(f"lib/*/faketime/{LIBRARY}")
    shutil.copy(library, folder)
    folder.chmod(0o755)
    container = {
        "name": "operator",
        "env": [{"name": name, "value": value} for name, value in ENV.items()],
        "volumeMounts": [{"name": "clock", "mountPath": IN_PODS}],
    }
    volume = {"name": "clock", "hostPath": {"path": "/models/clock"}}
    template = {"spec": {"containers": [container], "volumes": [volume]}}
    patch = json.dumps({"spec": {"template": template}})
    live_cluster.kubectl("patch", OPERATOR, f"--namespace={SYSTEM}", f"--patch={patch}")
    live_cluster.kubectl("rollout", "status", OPERATOR, f"--namespace={SYSTEM}", "--timeout=100s")
    yield
    live_cluster.kubectl("rollout", "undo", OPERATOR, f"--namespace={SYSTEM}")
    live_cluster.kubectl("rollout", "status", OPERATOR, f"--namespace={SYSTEM}", "--timeout=100s")


@pytest.mark.usefixtures("clock_ahead")
def test_a_group_is_made_anew_once(own_service: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    asked = ("exec", OPERATOR, f"--namespace={SYSTEM}", "--", "python3", "-c", "import time; print(time.time())")
    assert float(own_service.cluster.kubectl(*asked)) - time.time() > AHEAD_SECONDS / 2
    with watching(own_service.cluster, "pods", own_service.namespace) as pods:
        scenario = f"skewed clock: {AHEAD_SECONDS} s ahead, SIGKILL of rank 1"
        strike_a_group(scenario, "1", signalling(signal.SIGKILL), own_service, start_load, verdicts)
        states = pods.states_since(0.0)
    made = {uid for state in states for uid, pod in state.items() if role_of(pod) == "serve"}
    events = own_service.cluster.list("events", own_service.namespace)
    why = [each["message"] for each in events if each["involvedObject"]["kind"] == "InferenceService"]
    assert len(made) == (NUM_GROUPS + 1) * NUM_NODES, "\n".join(why)
