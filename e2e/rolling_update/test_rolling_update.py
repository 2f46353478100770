"""Verdict by traffic: what long streams saw while every engine under them was replaced, and while none could be."""

import time

from e2e.conftest import StartLoad
from e2e.engines import num_resumed
from e2e.live_cluster import LiveService, is_terminating
from e2e.traffic.answers import PROMPTS, answers
from e2e.traffic.traffic import Verdict
from e2e.verdicts import Verdicts
from e2e.watch import State, Watch, watching

NUM_TOKENS = 1900


def test_an_update_is_not_seen_by_streams_that_outlast_it(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    old = own_service.staying_uids("serve")
    grace_seconds = own_service.pods("serve")[0]["spec"]["terminationGracePeriodSeconds"]
    with (
        start_load(own_service, answers(NUM_TOKENS, prompts=PROMPTS[:2]), num_clients=12) as load,
        watching(own_service.cluster, "pods", own_service.namespace) as pods,
    ):
        changed_at = time.time()
        own_service.patch({"engine": {"maxNumSeqs": 24}})
        goings = [going(pods, uid) for uid in old]
        own_service.wait_ready()
        load.wait_streams(8)
        verdict = load.stop()
    resumed = num_resumed(own_service)
    verdicts.add(
        "rolling update",
        verdict,
        f"{resumed:.0f} streams resumed",
        update=max(gone_at for _, gone_at in goings) - changed_at,
        longest_stream=verdict.longest_stream_seconds,
        drain_and_grace=grace_seconds,
    )
    assert not verdict.failures, verdict
    assert verdict.longest_stream_seconds > grace_seconds
    assert any(spans(verdict, *each) for each in goings), "no stream outlived a pod that went"
    assert resumed > 0


def test_an_update_that_cannot_succeed_harms_nobody(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    before = own_service.staying_uids("serve")
    with start_load(own_service, answers(200), num_clients=4) as load:
        changed_at = time.time()
        own_service.patch({"engine": {"args": ["--no-such-flag"]}})
        degraded = own_service.wait_condition("Degraded", lambda found: found if is_true(found) else None, 90)
        told_after = time.time() - changed_at
        own_service.wait_condition("Progressing", lambda found: found.get("reason") == "RolloutHalted", 30)
        load.wait_streams(8)
        left = own_service.staying_uids("serve")
        own_service.patch({"engine": {"args": []}})
        own_service.wait_ready()
        verdict = load.stop()
    verdicts.add("rolling update that cannot succeed", verdict, status_says_so=told_after)
    assert "--no-such-flag" in degraded["message"], degraded
    assert before < left, "the pods that serve stay, beside one that does not start"
    assert own_service.staying_uids("serve") == before
    assert not verdict.failures, verdict


def going(pods: Watch, uid: str) -> tuple[float, float]:
    """When a pod was told to go, and when it was gone."""

    def is_told(state: State) -> bool:
        return uid in state and is_terminating(state[uid])

    told_at = pods.first(is_told, 180, "an old pod to be told to go")
    return told_at, pods.first(lambda state: uid not in state, 180, "an old pod to be gone", after=told_at)


def spans(verdict: Verdict, told_at: float, gone_at: float) -> bool:
    """Whether a stream began before a pod was told to go and ended, whole, after it had gone."""
    return any(each.outcome == "whole" and each.started < told_at and each.ended > gone_at for each in verdict.outcomes)


def is_true(condition: dict[str, str]) -> bool:
    return condition.get("status") == "True"
