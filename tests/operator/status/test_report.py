"""Writing the status: once where it changed, and only for the object that the pass read."""

import asyncio
from typing import Any

from tests.operator.cluster_objects import NOW, deployment, pod, service
from tests.operator.memory_kube import MemoryKube
from tests.operator.status.service_under_test import status_of

from kvasir_operator.status.report import is_news, report_status

PODS = [pod("e1"), pod("e2"), pod("r1", "router"), pod("r2", "router")]
STATUS = status_of([deployment()], PODS)
LATER = status_of([deployment()], PODS[1:])
OTHERS = {"type": "Audited", "status": "True", "reason": "Yes", "message": "", "lastTransitionTime": NOW}


def reported(stored: dict[str, Any] | None, read: dict[str, Any], status: dict[str, Any]) -> MemoryKube:
    kube = MemoryKube()
    if stored is not None:
        kube.objects[("InferenceService", "models", "llama")] = stored
    asyncio.run(report_status(kube, read, status))
    return kube


def test_a_changed_status_is_applied_whole() -> None:
    kube = reported(service(), service(), STATUS)
    assert kube.writes == [("apply status", "InferenceService llama")]
    assert kube.objects[("InferenceService", "models", "llama")]["status"] == STATUS


def test_an_unchanged_status_is_not_written_again() -> None:
    again = status_of([deployment()], PODS, previous=STATUS)
    assert reported(service(status=STATUS), service(status=STATUS), again).writes == []


def test_a_count_a_message_and_a_field_that_goes_are_news_and_a_condition_of_others_is_not() -> None:
    assert is_news(STATUS, {**STATUS, "ready": "1/2"})
    assert is_news(STATUS, {key: value for key, value in STATUS.items() if key != "url"})
    assert is_news(STATUS, LATER)
    changed = [{**STATUS["conditions"][0], "message": "x"}, *STATUS["conditions"][1:]]
    assert is_news(STATUS, {**STATUS, "conditions": changed})
    assert is_news(STATUS, {**STATUS, "scaling": [{"role": "serve"}]})
    assert not is_news({**STATUS, "conditions": [OTHERS, *STATUS["conditions"]], "others": []}, STATUS)


def test_a_service_that_changed_or_went_since_it_was_read_keeps_its_status() -> None:
    changed = service()
    changed["metadata"]["resourceVersion"] = "10"
    kube = reported(changed, service(), STATUS)
    assert kube.writes == []
    assert kube.objects[("InferenceService", "models", "llama")]["status"] == {}
    assert reported(None, service(), STATUS).writes == []


def test_says_whether_the_status_stands() -> None:
    kube = MemoryKube()
    assert not asyncio.run(report_status(kube, service(), STATUS))
    kube.objects[("InferenceService", "models", "llama")] = service()
    assert asyncio.run(report_status(kube, service(), STATUS))
    assert asyncio.run(report_status(kube, service(status=STATUS), STATUS))
