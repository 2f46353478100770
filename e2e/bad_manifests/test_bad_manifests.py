"""Verdict by status: the condition names the cause soon, and clears with it. The clients of a neighbour see nothing."""

import time
from collections.abc import Iterator

import pytest
from e2e.bad_manifests.broken import BROKEN, MANIFEST, REFUSED, Broken
from e2e.conftest import Deploy, StartLoad
from e2e.live_cluster import KubectlError, KubeObject, LiveCluster, LiveService
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Load
from e2e.verdicts import Verdicts

TELLS_WITHIN_SECONDS = 30.0
CLEARS_WITHIN_SECONDS = 120.0


@pytest.fixture(scope="module")
def neighbour(own_service: LiveService, start_load: StartLoad) -> Iterator[Load]:
    """A whole service in a namespace of its own, used lightly for as long as the others are broken and cured."""
    with start_load(own_service, answers(200), num_clients=1) as clients:
        yield clients


def names_cause(condition: KubeObject, broken: Broken) -> bool:
    return condition.get("reason") in broken.reasons and all(words in condition["message"] for words in broken.says)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name.replace(" ", "-"))
def test_the_status_names_the_cause_and_clears(
    broken: Broken, neighbour: Load, deploy: Deploy, live_cluster: LiveCluster, own_namespace: str, verdicts: Verdicts
) -> None:
    for obj in broken.before:
        live_cluster.apply(obj, namespace=own_namespace)
    applied = time.monotonic()
    service = deploy(MANIFEST, **broken.spec)
    service.wait_condition("Ready", lambda ready: names_cause(ready, broken), TELLS_WITHIN_SECONDS)
    named = time.monotonic()
    for obj in broken.remedy:
        live_cluster.apply(obj, namespace=own_namespace)
    if broken.cure is not None:
        service.patch(broken.cure)
    cured = time.monotonic()
    service.wait_ready(CLEARS_WITHIN_SECONDS)
    verdicts.add(f"bad manifests: {broken.name}", named=named - applied, ready_after_cure=time.monotonic() - cured)
    degraded = service.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("False", "AsExpected"), degraded


@pytest.mark.parametrize(("spec", "says"), REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED])
def test_kubectl_apply_refuses(spec: KubeObject, says: str, deploy: Deploy) -> None:
    with pytest.raises(KubectlError) as refusal:
        deploy(MANIFEST, **spec)
    assert says in str(refusal.value)


def test_the_neighbour_saw_nothing_of_it(neighbour: Load, verdicts: Verdicts) -> None:
    verdict = neighbour.stop()
    verdicts.add("bad manifests: a healthy neighbour", verdict)
    assert not verdict.failures, verdict
