"""Verdict by answers: who has a key is served, who has none or a revoked one is not, and no pod restarts for it."""

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml
from e2e.conftest import Deploy, StartLoad
from e2e.live_cluster import POLL_SECONDS, LiveCluster, LiveService, uid_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

MANIFEST = Path(__file__).parent / "service.yaml"
SECRET = "clients"
KEPT, SECOND_OF_RED, REVOKED, ROTATED = "key-red-1", "key-red-2", "key-blue-1", "key-blue-2"
BEFORE = {"red": [KEPT, SECOND_OF_RED], "blue": [REVOKED]}
AFTER = {"red": [KEPT, SECOND_OF_RED], "blue": [ROTATED]}
ENACTED_WITHIN_SECONDS = 180.0
"""A kubelet brings a changed Secret into a pod's files within its sync period and its cache's delay: 1 to 2 minutes."""


def test_keys_are_asked_for_and_one_that_is_revoked_is_refused_without_a_restart(
    live_cluster: LiveCluster, deploy: Deploy, own_namespace: str, start_load: StartLoad, verdicts: Verdicts
) -> None:
    write_keys(live_cluster, own_namespace, BEFORE)
    service = deploy(MANIFEST)
    service.wait_ready()
    lives = lives_of_containers(service)
    headers = {"Authorization": f"Bearer {KEPT}"}
    with start_load(service, answers(200), num_clients=3, headers=headers) as load, service.port_forward() as url:
        expected = {SECOND_OF_RED: 200, REVOKED: 200, ROTATED: 401, "red": 401, None: 401}
        assert {key: status_of_request(url, service.model, key) for key in expected} == expected
        write_keys(live_cluster, own_namespace, AFTER)
        written = time.monotonic()
        wait_until(
            lambda: status_of_request(url, service.model, REVOKED) == 401,
            ENACTED_WITHIN_SECONDS,
            "the revoked key to be refused",
            POLL_SECONDS,
        )
        refused = time.monotonic()
        assert status_of_request(url, service.model, ROTATED) == 200
        verdict = load.stop()
    verdicts.add("API keys", verdict, revoked_key_refused=refused - written)
    assert not verdict.failures, verdict
    assert lives_of_containers(service) == lives


def test_no_object_but_the_secret_shows_a_key(
    live_cluster: LiveCluster, deploy: Deploy, own_namespace: str, verdicts: Verdicts
) -> None:
    write_keys(live_cluster, own_namespace, BEFORE)
    service = deploy(MANIFEST)
    service.wait_ready()
    namespace, kinds = f"--namespace={own_namespace}", "deployments,pods,configmaps,inferenceservices,events"
    shown = live_cluster.kubectl("get", kinds, namespace, "-o=yaml", "--show-managed-fields")
    shown += live_cluster.kubectl("describe", "secret", SECRET, namespace)
    assert "red" in shown
    assert [key for key in (KEPT, SECOND_OF_RED, REVOKED) if key in shown] == []


def write_keys(cluster: LiveCluster, namespace: str, keys: dict[str, list[str]]) -> None:
    """By server-side apply: the other one keeps a copy of what was applied in an annotation, in clear."""
    values = {tenant: "".join(f"{key}\n" for key in of_tenant) for tenant, of_tenant in keys.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": values}
    cluster.kubectl("apply", "--server-side", f"--namespace={namespace}", "-f", "-", text=yaml.safe_dump(secret))


def status_of_request(url: str, model: str, key: str | None) -> int:
    """`key` None: without any, which OpenAI's client would not even send."""
    body = json.dumps({"model": model, "prompt": "import os\n", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def lives_of_containers(service: LiveService) -> set[tuple[str, int]]:
    """Each container by its pod's uid and the number of its restarts."""
    pods = [pod for role in ("serve", "router") for pod in service.pods(role)]
    return {(uid_of(pod), each["restartCount"]) for pod in pods for each in pod["status"]["containerStatuses"]}
