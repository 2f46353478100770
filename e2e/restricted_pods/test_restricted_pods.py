"""Verdict by admission: every pod, the operator's too, is let in where Pod Security forbids all that it can."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.conftest import StartLoad
from e2e.helm.helm import Helm
from e2e.live_cluster import SYSTEM, KubectlError, KubeObject, LiveCluster, LiveService, deploy_service
from e2e.model_download.hub import OPEN, serving_hub
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts

HERE = Path(__file__).parent
FOREIGN_IDS = {"runAsUser": 1000710000, "runAsGroup": 0, "fsGroup": 1000710000}
"""As OpenShift gives them: a user that no image names and no /etc/passwd knows, of the group 0."""
ENFORCED = "pod-security.kubernetes.io/enforce"
MODELS, CLAIM = "kvasir-e2e-models", "models"
OPERATOR = "deployment/kvasir-operator"
BYTES_PER_SECOND = 50_000_000


@pytest.fixture(scope="module")
def restricted(live_cluster: LiveCluster, kvasir: Helm) -> Iterator[str]:
    """A namespace that admits only pods of the level `restricted`, with the models on a volume."""
    with live_cluster.namespace("restricted-pods", {ENFORCED: "restricted"}) as namespace:
        live_cluster.apply(models_volume(namespace), models_claim(), namespace=namespace)
        try:
            yield namespace
        finally:
            live_cluster.kubectl("delete", "persistentvolume", MODELS, "--wait=false")


@pytest.fixture
def restricted_system(live_cluster: LiveCluster, kvasir: Helm) -> Iterator[str]:
    """The operator's own namespace under the same rule."""
    live_cluster.kubectl("label", "namespace", SYSTEM, f"{ENFORCED}=restricted", "--overwrite")
    try:
        yield SYSTEM
    finally:
        live_cluster.kubectl("label", "namespace", SYSTEM, f"{ENFORCED}-")


def test_engine_and_router_are_admitted_and_serve(
    live_cluster: LiveCluster, restricted: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with pytest.raises(KubectlError, match="violates PodSecurity"):  # or the level is not enforced at all
        live_cluster.kubectl("run", "root", "--image=nobody.example/root:1", f"--namespace={restricted}")
    service = deploy_service(live_cluster, HERE / "service.yaml", restricted)
    assert_serves(service, start_load, verdicts, "restricted Pod Security")


def test_engine_and_router_serve_as_a_user_that_their_images_do_not_know(
    live_cluster: LiveCluster, restricted: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    service = deploy_service(live_cluster, HERE / "service.yaml", restricted, "foreign", **under_foreign_ids())
    assert_serves(service, start_load, verdicts, "restricted Pod Security, foreign ids")


def test_a_loader_fills_the_cache_as_a_user_that_its_image_does_not_know(
    live_cluster: LiveCluster, rig: None, restricted: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    model = {"source": f"hf://{OPEN}", "name": "kvasir-python"}
    with serving_hub(BYTES_PER_SECOND) as hub:
        replaced = under_foreign_ids({"name": "HF_ENDPOINT", "value": hub})
        service = deploy_service(live_cluster, HERE / "service.yaml", restricted, "fetched", model=model, **replaced)
        assert_serves(service, start_load, verdicts, "restricted Pod Security, foreign ids, downloaded model")


def test_the_operator_is_admitted(live_cluster: LiveCluster, restricted_system: str) -> None:
    namespace = f"--namespace={restricted_system}"
    live_cluster.kubectl("rollout", "restart", OPERATOR, namespace)
    live_cluster.kubectl("rollout", "status", OPERATOR, namespace, "--timeout=100s")


def assert_serves(service: LiveService, start_load: StartLoad, verdicts: Verdicts, scenario: str) -> None:
    service.wait_ready()
    with start_load(service, answers(200), num_clients=3) as load:
        load.wait_streams(6)
        verdict = load.stop()
    service.delete()
    verdicts.add(scenario, verdict)
    assert not verdict.failures, verdict


def under_foreign_ids(*env: KubeObject) -> dict[str, KubeObject]:
    """What of the manifest is replaced so that all its pods have them; `env`: of the engine's besides."""
    spec: KubeObject = yaml.safe_load((HERE / "service.yaml").read_text())["spec"]
    given = {"securityContext": FOREIGN_IDS}
    return {"pod": {"env": [*spec["pod"]["env"], *env], **given}, "router": {**spec["router"], "pod": given}}


def models_volume(namespace: str) -> KubeObject:
    """The folder that every node has, for the claim of one namespace."""
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": "/models"},
        "claimRef": {"name": CLAIM, "namespace": namespace},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": MODELS}, "spec": spec}


def models_claim() -> KubeObject:
    spec = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": MODELS,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}
