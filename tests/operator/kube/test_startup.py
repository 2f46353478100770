"""Waiting for the API server at the start, and what is not worth waiting for."""

import asyncio
import logging

import pytest
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import (
    CrdNotInstalledError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectNotFoundError,
)
from kvasir_operator.kube.features import wait_until_served
from kvasir_operator.queue.back_off import BackOff

AT_ONCE = BackOff(first_seconds=0.0, longest_seconds=0.0)


def waited(*failures: KubeApiError) -> MemoryKube:
    """The API server after it was waited for; its first answers were `failures`."""
    kube = MemoryKube()
    kube.failures = [*failures]
    assert asyncio.run(wait_until_served(kube, None, AT_ONCE)) == frozenset()
    return kube


def test_an_api_server_that_is_away_is_tried_until_it_answers() -> None:
    assert waited(*[KubeUnavailableError("down")] * 20).failures == []


def test_each_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waited(*[KubeUnavailableError("refused")] * 3, *[KubeUnavailableError("starting")] * 3)
    assert caplog.messages == [
        "waiting for the API server: refused",
        "waiting for the API server: starting",
        "the API server answers",
    ]


def test_an_api_server_that_answers_at_once_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waited()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ObjectNotFoundError("no such kind", 404), CrdNotInstalledError),
        (KubeForbiddenError("may not list", 403), KubeForbiddenError),
        (KubeUnavailableError("who are you", 401), KubeUnavailableError),
    ],
)
def test_an_answer_that_waiting_would_not_change_is_raised(answer: KubeApiError, expected: type[KubeApiError]) -> None:
    with pytest.raises(expected):
        waited(KubeUnavailableError("down"), answer)
