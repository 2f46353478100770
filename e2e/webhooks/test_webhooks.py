"""Verdict by status and by what is written: an admission webhook that fails, and one that changes every write.

The API server asks them; the operator only hears what comes of it.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import ROUTER_IMAGE, Deploy, StartLoad
from e2e.live_cluster import SYSTEM, KubeObject, LiveCluster, LiveService, name_of, revision_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.webhooks.admission import DEPLOYMENTS, SERVICES, Asked, WebhookServer, webhook_server
from e2e.webhooks.server import CPU_REQUEST, POLICY
from tests.controlplane.processes import wait_until

MANIFEST = Path(__file__).parent / "service.yaml"
FAILING, MUTATING = "fails.e2e.kvasir.dev", "mutates.e2e.kvasir.dev"
TELLS_WITHIN_SECONDS = 30.0
CONVERGED_WITHIN_SECONDS = 120.0
QUIET_SECONDS = 60.0
OPERATOR = f"system:serviceaccount:{SYSTEM}:kvasir-operator"


@pytest.fixture(scope="module")
def webhooks(live_cluster: LiveCluster) -> Iterator[WebhookServer]:
    with webhook_server(live_cluster, ROUTER_IMAGE) as server:
        yield server


def test_the_status_names_a_webhook_that_fails_and_serving_goes_on(
    webhooks: WebhookServer, deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    service = deploy(MANIFEST)
    service.wait_ready()
    before = service.staying_uids("serve", "router")
    with start_load(service, answers(200), num_clients=3) as load:
        with webhooks.asked_first("Validating", FAILING, "/fail", service.namespace, [DEPLOYMENTS]):
            changed = time.monotonic()
            service.patch({"engine": {"maxNumSeqs": 12}})
            service.wait_condition("Degraded", names_webhook, TELLS_WITHIN_SECONDS)
            named = time.monotonic()
            assert is_status_current(service), "the pass ended before the status"
            assert len(service.children("services", "serve")) == 2, "the pass ended at what was refused"
            assert service.condition("Ready")["status"] == "True"
            load.wait_streams(6)
            assert service.staying_uids("serve", "router") == before
        removed = time.monotonic()
        service.wait_ready(CONVERGED_WITHIN_SECONDS)
        converged = time.monotonic()
        load.wait_streams(3)
        verdict = load.stop()
    verdicts.add("webhook that fails", verdict, named=named - changed, converged_without_it=converged - removed)
    assert not verdict.failures, verdict
    assert service.condition("Degraded")["status"] == "False"


def test_what_a_webhook_changes_is_not_fought(
    webhooks: WebhookServer, deploy: Deploy, own_namespace: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    with webhooks.asked_first("Mutating", MUTATING, "/mutate", own_namespace, [DEPLOYMENTS, SERVICES]):
        service = deploy(MANIFEST)
        service.wait_ready()
        assert all(map(is_changed_by_policy, workloads(service)))
        with start_load(service, answers(200), num_clients=2) as load:
            pods, objects = service.staying_uids("serve", "router"), versions(service)
            num_before = len(webhooks.asked())
            poke(service)
            time.sleep(QUIET_SECONDS)  # the scenario itself
            asked = webhooks.asked()[num_before:]
            verdict = load.stop()
        assert by_operator(asked, is_dry_run=False) == []
        assert versions(service) == objects
        assert service.staying_uids("serve", "router") == pods
        assert service.is_ready()
        assert service.condition("Degraded")["status"] == "False"
        dry_runs = len(by_operator(asked, is_dry_run=True))
        verdicts.add("webhook that mutates", verdict, f"0 writes and {dry_runs} dry runs in {QUIET_SECONDS:.0f} s")
        assert not verdict.failures, verdict
        change_and_converge(service)


def change_and_converge(service: LiveService) -> None:
    """What the operator itself wants changed still comes about beneath the policy."""
    old = {revision_of(pod) for pod in service.pods("serve")}
    service.patch({"engine": {"maxNumSeqs": 12}})
    service.wait_ready()
    wait_until(lambda: not old & {revision_of(pod) for pod in service.pods("serve")}, 60, "the old pods to go")
    assert all(map(is_changed_by_policy, workloads(service)))


def names_webhook(condition: KubeObject) -> bool:
    return condition.get("status") == "True" and FAILING in condition["message"]


def is_status_current(service: LiveService) -> bool:
    found = service.cluster.get("inferenceservice", service.name, service.namespace) or {}
    return bool(found["status"].get("observedGeneration") == found["metadata"]["generation"])


def workloads(service: LiveService) -> list[KubeObject]:
    """Of engines and router, those of former revisions too."""
    return [*service.children("deployments", "serve"), *service.children("deployments", "router")]


def is_changed_by_policy(workload: KubeObject) -> bool:
    template = workload["spec"]["template"]
    requests = {container["resources"]["requests"]["cpu"] for container in template["spec"]["containers"]}
    is_annotated = f"{POLICY}/injected" in template["metadata"].get("annotations", {})
    return is_annotated and f"{POLICY}/seen" in workload["metadata"]["labels"] and requests == {CPU_REQUEST}


def versions(service: LiveService) -> dict[str, str]:
    """Of everything that the webhook is asked about; a write that changes nothing leaves them as they are."""
    services = service.cluster.list("services", service.namespace)
    return {
        f"{obj['kind']} {name_of(obj)}": obj["metadata"]["resourceVersion"] for obj in (*workloads(service), *services)
    }


def poke(service: LiveService) -> None:
    """Cause a pass that has nothing to do."""
    namespace, mark = f"--namespace={service.namespace}", f"e2e.kvasir.dev/poked={time.time()}"
    service.cluster.kubectl("annotate", "inferenceservice", service.name, namespace, mark)


def by_operator(asked: list[Asked], *, is_dry_run: bool) -> list[Asked]:
    return [each for each in asked if each.user == OPERATOR and each.is_dry_run == is_dry_run]
