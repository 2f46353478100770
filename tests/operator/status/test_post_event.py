"""Posting Events: one object a fact, counted when it is reported again."""

import asyncio

from tests.operator.cluster_objects import NOW, service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.status.events import ServiceEvent, post_event

LATER = "2026-11-20T11:00:00Z"
READY = ServiceEvent("Normal", "Ready", "2 of 2")


def posted(*facts: tuple[ServiceEvent, str]) -> MemoryKube:
    async def body(kube: MemoryKube) -> None:
        for event, now in facts:
            await post_event(kube, service(), event, now)

    kube = MemoryKube()
    asyncio.run(body(kube))
    return kube


def test_an_event_names_its_service() -> None:
    (event,) = posted((READY, NOW)).objects.values()
    assert event["metadata"]["namespace"] == "models"
    assert event["involvedObject"]["uid"] == "uid-1"
    assert (event["type"], event["reason"], event["message"], event["count"]) == ("Normal", "Ready", "2 of 2", 1)


def test_the_same_fact_again_raises_the_count_and_another_is_an_event_of_its_own() -> None:
    kube = posted((READY, NOW), (ServiceEvent("Warning", "NotReady", "x"), NOW), (READY, LATER))
    first, second = kube.objects.values()
    assert (first["count"], first["firstTimestamp"], first["lastTimestamp"]) == (2, NOW, LATER)
    assert second["count"] == 1


def test_a_message_that_the_api_server_would_refuse_for_its_length_is_cut() -> None:
    (event,) = posted((ServiceEvent("Warning", "CrashLooping", "x" * 5000), NOW)).objects.values()
    assert len(event["message"]) == 1024
