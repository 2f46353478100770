"""A model comes from a hub: how far it is, once for all replicas, and what keeps one away."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from e2e.cluster.rig.guest import log_of
from e2e.cluster.rig.layout import MODELS
from e2e.conftest import RIG_KUBECONFIG, Deploy, StartLoad
from e2e.live_cluster import KubeObject, LiveCluster
from e2e.model_download.hub import GATED, NAME, OPEN, PRIVATE, serving_hub
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from tests.runtime.model_sources.hub_server import TOKEN

MANIFEST = Path(__file__).parent / "service.yaml"
BYTES_PER_SECOND = 400_000
"""The model's 14 MB take 35 s."""
CACHE = MODELS / "cache"
"""`/models/cache` of every node."""
PROGRESS = re.compile(r"downloading hf://kvasir/open: (\d+\.\d+) of 14\.\d+ MB, (\d+\.\d) MB/s, (\d+) s left")
NO_SECRET: dict[str, str] = {}

pytestmark = pytest.mark.timeout(600, func_only=True)


@dataclass(frozen=True)
class Progress:
    megabytes: float
    megabytes_per_second: float
    seconds_left: float


@pytest.fixture(scope="module", autouse=True)
def hub(live_cluster: LiveCluster) -> Iterator[None]:
    if live_cluster.kubeconfig != RIG_KUBECONFIG:
        pytest.skip("runs a hub in the network of the rig's control plane: unset KUBECONFIG")
    CACHE.mkdir(exist_ok=True)
    CACHE.chmod(0o777)  # pods are not root
    with serving_hub(BYTES_PER_SECOND):
        yield


def test_a_download_says_how_far_it_is_and_is_made_once_for_all_replicas(
    deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    service = deploy(MANIFEST)
    first = service.wait_condition("Ready", progress, 120)
    second = service.wait_condition("Ready", lambda ready: further(progress(ready), first), 30)
    service.patch({"replicas": 2})  # its pod finds the cache locked, or filled
    assert all(0 < each.megabytes_per_second < 1 and 0 < each.seconds_left < 120 for each in (first, second))
    service.wait_ready()
    assert len(service.staying_uids("serve")) == 2
    assert [each["offset"] for each in asked() if each["path"] == "model.safetensors"] == [0]
    with start_load(service, answers(200), num_clients=4) as load:
        load.wait_streams(4)
        verdict = load.stop()
    verdicts.add("model download: two replicas of one download", verdict)
    assert not verdict.failures, verdict


@pytest.mark.parametrize(
    ("repository", "secret", "reason", "words"),
    [
        (GATED, {"HF_TOKEN": TOKEN}, "ModelAccessDenied", "is gated: ask for access"),
        (PRIVATE, NO_SECRET, "ModelNotFound", "a private one needs a token"),
        (f"{OPEN}@no-such-revision", NO_SECRET, "ModelNotFound", "has no revision no-such-revision"),
    ],
    ids=["gated", "private", "no such revision"],
)
def test_what_keeps_a_model_away_is_named(
    deploy: Deploy,
    live_cluster: LiveCluster,
    own_namespace: str,
    repository: str,
    secret: dict[str, str],
    reason: str,
    words: str,
) -> None:
    live_cluster.apply(token_secret(secret), namespace=own_namespace)
    service = deploy(MANIFEST, model=model(repository))
    assert words in service.wait_condition("Ready", partial(message_of, reason), 60)
    assert TOKEN not in json.dumps(service.status)


def test_a_wrong_token_is_named_and_the_right_one_mends_it(
    deploy: Deploy, live_cluster: LiveCluster, own_namespace: str
) -> None:
    live_cluster.apply(token_secret({"HF_TOKEN": "hf_a_wrong_one"}), namespace=own_namespace)
    service = deploy(MANIFEST, model=model(PRIVATE))
    assert "is HF_TOKEN valid" in service.wait_condition("Ready", partial(message_of, "ModelAccessDenied"), 60)
    assert "hf_a_wrong_one" not in json.dumps(service.status)
    live_cluster.apply(token_secret({"HF_TOKEN": TOKEN}), namespace=own_namespace)
    service.wait_ready(300)  # the kubelet's back-off, then the download


def model(repository: str) -> KubeObject:
    source = {"source": f"hf://{repository}", "name": "kvasir-python"}
    return {**source, "cache": {"hostPath": "/models/cache"}, "secretRef": {"name": "hub-token"}}


def token_secret(content: dict[str, str]) -> KubeObject:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "stringData": content}


def message_of(reason: str, ready: KubeObject) -> str | None:
    """None while the condition has another reason."""
    return str(ready["message"]) if ready.get("reason") == reason else None


def progress(ready: KubeObject) -> Progress | None:
    """None while the condition says nothing of it."""
    found = PROGRESS.search(ready.get("message", "")) if ready.get("reason") == "DownloadingModel" else None
    return None if found is None else Progress(*map(float, found.groups()))


def further(now: Progress | None, before: Progress) -> Progress | None:
    return now if now is not None and now.megabytes > before.megabytes else None


def asked() -> list[KubeObject]:
    """Every file that was asked for so far."""
    return [json.loads(line) for line in log_of(NAME).read_text().splitlines() if line.startswith("{")]
