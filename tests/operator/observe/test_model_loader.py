"""What a pod's loader says: how far it is, why it ended, and when its last failure no longer counts."""

from typing import Any

import pytest
from tests.operator.cluster_objects import NOW, pod, waiting_container

from kvasir_operator.api.conditions import DEGRADING_REASONS, DOWNLOAD_FAILURES, Reason
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.model_loader import (
    DownloadProgress,
    engine_waits_since,
    is_downloading,
    look_at_downloads_seconds,
)
from kvasir_operator.observe.waiting import Waiting, why_pod_waits

GATED = "hf://org/name is gated: ask for access on its page, and give a token of that account as HF_TOKEN"
LOG = f"2026-11-20 INFO fetch: begins\nkvasir-runtime: error: ModelAccessDenied: {GATED}\n"
ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": LOG, "finishedAt": NOW}}
BEGUN = DownloadProgress("hf://org/name", "resolving", 0, 0, 0.0, None, 0.0)
DOWNLOADING = DownloadProgress("hf://org/name", "downloading", 12_340_000_000, 140_500_000_000, 4.1e8, 312.4, 0.0)

SMALL = DownloadProgress("hf://org/name", "downloading", 5_250_000, 999_990_000, 4e5, 20.0, 0.0)


def loader(state: KubeObject, name: str = "model-loader", **fields: Any) -> KubeObject:
    return {"name": name, "state": state, "ready": False, "restartCount": 0, **fields}


def loading_pod(*loaders: KubeObject) -> KubeObject:
    engine = waiting_container("PodInitializing")
    return pod("p", ready=False, initContainerStatuses=list(loaders), containerStatuses=[engine])


def why(container: KubeObject, download: DownloadProgress | None = None) -> Waiting:
    waiting = why_pod_waits(loading_pod(container), (), download)
    assert waiting is not None
    return waiting


RUNNING = loader({"running": {"startedAt": NOW}}, started=True)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (None, "the model is being downloaded; its loader has not said yet how far it is"),
        (BEGUN, "downloading hf://org/name: asking the source what there is"),
        (DOWNLOADING, "downloading hf://org/name: 12.34 of 140.50 GB, 410.0 MB/s, 5 min 12 s left"),
        (SMALL, "downloading hf://org/name: 5.25 of 999.99 MB, 0.4 MB/s, 20 s left"),
        (
            DownloadProgress("hf://a/b", "downloading", 10**9, 10**12, 1e6, 999_000.0, 14.9),
            "downloading hf://a/b: 1.00 of 1000.00 GB, 1.0 MB/s, 277 h 30 min left",
        ),
        (
            DownloadProgress("hf://a/b", "downloading", 10**9, 2 * 10**9, 0.0, None, 15.0),
            "downloading hf://a/b: 1.00 of 2.00 GB, no byte for 15 s",
        ),
        (
            DownloadProgress("hf://a/b", "verifying", 2 * 10**9, 2 * 10**9, 1e6, None, 0.0),
            "downloading hf://a/b: 2.00 of 2.00 GB, comparing checksums",
        ),
        (
            DownloadProgress("hf://a/b", "waiting", 10**9, 2 * 10**9, 1e6, 9.0, 0.0),
            "downloading hf://a/b: waits for the replica that fills the cache, which has 1.00 of 2.00 GB",
        ),
        (
            DownloadProgress("hf://a/b", "waiting", 0, 0, 0.0, None, 0.0),
            "downloading hf://a/b: waits for the replica that fills the cache",
        ),
    ],
)
def test_how_far_a_download_is(progress: DownloadProgress | None, words: str) -> None:
    assert why(RUNNING, progress) == Waiting(Reason.DOWNLOADING_MODEL, f"pod p: {words}")


def test_the_loader_names_why_it_ended() -> None:
    assert why(loader(ENDED)) == Waiting(Reason.MODEL_ACCESS_DENIED, f"pod p: {GATED}")


@pytest.mark.parametrize("reason", sorted(DOWNLOAD_FAILURES))
def test_whatever_it_names_degrades_the_service(reason: Reason) -> None:
    ended = {"terminated": {"exitCode": 1, "message": f"kvasir-runtime: error: {reason.value}: why"}}

    assert why(loader(ended)).reason is reason
    assert reason in DEGRADING_REASONS


def test_between_two_attempts_it_says_the_same() -> None:
    backing_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    assert why(loader(backing_off, lastState=ENDED, restartCount=7)).reason is Reason.MODEL_ACCESS_DENIED


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        (None, Reason.MODEL_ACCESS_DENIED),
        (BEGUN, Reason.MODEL_ACCESS_DENIED),
        (DOWNLOADING, Reason.DOWNLOADING_MODEL),
    ],
)
def test_a_failure_counts_until_the_next_attempt_downloads(progress: DownloadProgress | None, reason: Reason) -> None:
    again = loader({"running": {"startedAt": NOW}}, lastState=ENDED, restartCount=7, started=True)
    assert why(again, progress).reason is reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", Reason.CONTAINER_FAILED),
        ("kvasir-runtime: error: unknown argument --x", Reason.CONTAINER_FAILED),
        ("kvasir-runtime: error: Serving: it is not", Reason.CONTAINER_FAILED),
    ],
)
def test_an_end_without_a_reason_of_ours_is_that_of_any_container(message: str, reason: Reason) -> None:
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}
    assert why(loader(ended)).reason is reason


def test_a_loader_whose_image_is_missing_says_so() -> None:
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    assert why(loader(waits)).reason is Reason.IMAGE_PULL_FAILED


def test_another_init_container_is_no_loader() -> None:
    assert why(loader({"running": {}}, "theirs")).reason is Reason.INITIALIZING


def test_downloads_are_looked_at_again_while_there_are_any() -> None:
    assert look_at_downloads_seconds([pod("a"), loading_pod(RUNNING)]) == 5.0
    assert look_at_downloads_seconds([pod("a"), loading_pod(loader(ENDED))]) is None
    leaving = loading_pod(RUNNING)
    leaving["metadata"]["deletionTimestamp"] = NOW
    assert not is_downloading(leaving)


def test_an_engine_waits_from_the_end_of_its_last_loader_on() -> None:
    later = "2026-11-20T13:00:00Z"
    done = [{"terminated": {"exitCode": 0, "finishedAt": at}} for at in (NOW, later)]
    drafted = loading_pod(loader(done[0]), loader(done[1], "draft-model-loader"))

    assert engine_waits_since(drafted) == later
    assert engine_waits_since(pod("a")) == NOW
    assert engine_waits_since(loading_pod(loader(done[0]), loader({"running": {}}, "draft-model-loader"))) is None
    assert engine_waits_since(loading_pod(loader(ENDED))) is None
