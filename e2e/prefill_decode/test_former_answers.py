"""Verdict by traffic: the KV of a former answer is fetched by the prefill pod of the next turn, from decode pods one of
which is killed."""

import dataclasses
import signal
import time
from pathlib import Path

import pytest
import yaml
from e2e.conftest import Deploy, StartLoad
from e2e.engine_processes import signalling
from e2e.engines import busy_engine, is_whole_without
from e2e.live_cluster import POLL_SECONDS, LiveService
from e2e.traffic.answers import Answer, answers
from e2e.verdicts import Verdicts
from e2e.watch import watching
from tests.controlplane.processes import wait_until

MANIFEST = Path(__file__).parent / "service.yaml"
NUM_CLIENTS = 4
NUM_ENGINES = 3
WHOLE_WITHIN_SECONDS = 180.0
NUM_PROMPT, NUM_ANSWERED, NUM_ADDED, NUM_ANSWERED_THEN = 100, 500, 200, 100
"""Tokens of a conversation of two turns. A prefill pod lacks the first answer, which is worth a fetch, and computes
what the second turn adds, which is too long for a decode pod to compute."""
RECEIVED = 'kvasir_kv_transfer_blocks_total{.*direction="received".*}'

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.mark.usefixtures("rig")
def test_a_prefill_pod_fetches_former_answers_from_decode_pods(
    deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    service = deploy(MANIFEST, **exchanging())
    service.wait_ready()
    load = start_load(service, conversations(), num_clients=NUM_CLIENTS, is_salted=True)
    with load as clients, watching(service.cluster, "pods", service.namespace) as pods:
        fetched = wait_fetched(service, 0)
        victim = busy_engine(service, role="decode")
        struck = time.time()
        signalling(signal.SIGKILL)(victim)
        what = f"{NUM_ENGINES} ready engines of {service.name} without {victim.pod} as it was"
        whole = pods.first(is_whole_without(victim, NUM_ENGINES), WHOLE_WITHIN_SECONDS, what, after=struck)
        clients.wait_streams(2 * NUM_CLIENTS)
        fetched = wait_fetched(service, fetched)
        verdict = clients.stop()
    note = f"{fetched} blocks of former answers fetched by a prefill pod"
    verdicts.add("prefill and decode: former answers, SIGKILL of decode", verdict, note, whole_again=whole - struck)
    assert not verdict.failures, verdict


def exchanging() -> dict[str, object]:
    """Of the manifest's spec: one prefill pod, so that it had the first turn too, and lacks no more than the answer."""
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    roles = spec["disaggregation"]
    return {
        "engine": spec["engine"] | {"kvTransfer": True},
        "disaggregation": roles | {"prefill": roles["prefill"] | {"replicas": 1}},
    }


def conversations() -> list[Answer]:
    num_known = NUM_PROMPT + NUM_ANSWERED + NUM_ADDED
    first_turns = answers(NUM_ANSWERED, num_given=NUM_PROMPT)
    second_turns = answers(NUM_ANSWERED_THEN, num_given=num_known)
    return [
        dataclasses.replace(first, next_turn=second) for first, second in zip(first_turns, second_turns, strict=True)
    ]


def wait_fetched(service: LiveService, before: int) -> int:
    """Until the prefill pod has received more blocks than before; how many then."""
    [prefill] = service.pods("prefill")

    def more() -> int | None:
        now = int(service.metric(prefill, RECEIVED))
        return now if now > before else None

    what = f"blocks of former answers to come to the prefill pod of {service.name}"
    return wait_until(more, 120, what, POLL_SECONDS)
