"""Writing the status: once where it changed, and only for the object that the pass read."""

import asyncio
from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, deployment, pod, service
from tests.operator.memory_kube import MemoryKube
from tests.operator.status.service_under_test import status_of

from kvasir_operator.status.report import differs_in_detail, is_news, report_status

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


def condition_with(**fields: Any) -> list[dict[str, Any]]:
    return [{**STATUS["conditions"][0], **fields}, *STATUS["conditions"][1:]]


@pytest.mark.parametrize(
    ("change", "is_detail"),
    [
        ({}, False),
        ({"ready": "1/2"}, True),
        ({"replicas": 3}, True),
        ({"roles": [{**STATUS["roles"][0], "message": "x", "draining": 1}, *STATUS["roles"][1:]]}, True),
        ({"roles": [{**STATUS["roles"][0], "revision": "bbbb"}, *STATUS["roles"][1:]]}, False),
        ({"roles": STATUS["roles"][1:]}, False),
        ({"conditions": condition_with(message="x")}, True),
        ({"conditions": condition_with(reason="Idle")}, True),
        ({"conditions": condition_with(status="False")}, False),
        ({"observedGeneration": 2}, False),
        ({"phase": "Updating"}, True),
        ({"url": "http://other"}, False),
        ({"scaling": [{"role": "serve"}]}, False),
    ],
)
def test_what_is_waited_for_is_no_detail_and_the_rest_is(change: dict[str, Any], is_detail: bool) -> None:
    assert differs_in_detail(STATUS, {**STATUS, **change}) is is_detail


def test_a_first_status_is_no_detail_and_conditions_of_others_do_not_matter() -> None:
    assert not differs_in_detail({}, STATUS)
    assert differs_in_detail({**STATUS, "conditions": [OTHERS, *STATUS["conditions"]]}, {**STATUS, "ready": "1/2"})


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
