"""Verdict by traffic: two models side by side answer each as itself; a release that may act in one namespace does."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from e2e.conftest import Deploy, StartLoad, install_operator
from e2e.helm.helm import Helm
from e2e.live_cluster import SYSTEM, KubectlError, LiveCluster, LiveService, uid_of
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

HERE = Path(__file__).parent
LARGE, SMALL = HERE / "large.yaml", HERE / "small.yaml"
NUM_TOKENS = 200
NAMESPACED = "crds.install=false,rbac.aggregateRoles=false"
OPERATORS = "app.kubernetes.io/component=operator"


@pytest.fixture
def namespaced_release(live_cluster: LiveCluster, kvasir: Helm, own_namespace: str) -> Iterator[Helm]:
    """Kvasir for the test's namespace only, in place of the one for the whole cluster, which comes back at the end."""
    kvasir.uninstall(SYSTEM)
    try:
        wait_until(lambda: not live_cluster.list("pods", SYSTEM, OPERATORS), 60, "the cluster's operators to be gone")
        install_operator(kvasir, f"--set={NAMESPACED},watch.namespaces={{{own_namespace}}}", namespace=own_namespace)
        yield kvasir
    finally:
        if own_namespace in {release["namespace"] for release in kvasir.releases()}:
            kvasir.uninstall(own_namespace)
        install_operator(kvasir)


def assert_answers_to_its_own_name_only(service: LiveService, other: LiveService) -> None:
    with service.port_forward() as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [service.model]
        with pytest.raises(openai.NotFoundError, match=other.model):
            client.completions.create(model=other.model, prompt="import os\n", max_tokens=1)


def may_list_pods(cluster: LiveCluster, account_namespace: str, namespace: str) -> bool:
    """Whether the operator installed in `account_namespace` may."""
    account = f"--as=system:serviceaccount:{account_namespace}:kvasir-operator"
    try:
        cluster.kubectl("auth", "can-i", "list", "pods", f"--namespace={namespace}", account)
    except KubectlError:
        return False
    return True


def test_two_models_in_one_namespace_answer_each_as_itself(
    deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    large, small = deploy(LARGE), deploy(SMALL)
    of_large, of_small = answers(NUM_TOKENS, large.model), answers(NUM_TOKENS, small.model)
    assert not {answer.text for answer in of_large} & {answer.text for answer in of_small}
    for service in (large, small):
        service.wait_ready()
    with (
        start_load(large, of_large, num_clients=3, name="clients-of-large") as clients_of_large,
        start_load(small, of_small, num_clients=3, name="clients-of-small") as clients_of_small,
    ):
        assert_answers_to_its_own_name_only(large, small)
        assert_answers_to_its_own_name_only(small, large)
        for service, clients in ((large, clients_of_large), (small, clients_of_small)):
            clients.wait_streams(20)
            verdict = clients.stop()
            verdicts.add(f"two services: {service.model}", verdict)
            assert not verdict.failures, verdict


def test_a_release_of_one_namespace_serves_that_one_and_hands_over(
    live_cluster: LiveCluster, own_namespace: str, namespaced_release: Helm, deploy: Deploy, start_load: StartLoad,
    verdicts: Verdicts,
) -> None:  # fmt: skip
    with live_cluster.namespace("served-by-nobody") as elsewhere:
        waiting, served = deploy(SMALL, namespace=elsewhere), deploy(SMALL)
        served.wait_ready()
        assert may_list_pods(live_cluster, own_namespace, own_namespace)
        assert not may_list_pods(live_cluster, own_namespace, elsewhere)
        assert waiting.status == {}
        assert live_cluster.list("deployments", elsewhere) == []
        pods = {uid_of(pod) for role in ("serve", "router") for pod in served.pods(role)}
        with start_load(served, answers(NUM_TOKENS, served.model), num_clients=3) as clients:
            namespaced_release.uninstall(own_namespace)
            install_operator(namespaced_release)
            waiting.wait_ready()
            clients.wait_streams(3)
            verdict = clients.stop()
        verdicts.add("two services: one namespace's release, handed over to the cluster's", verdict)
        assert not verdict.failures, verdict
        assert served.is_ready()
        assert {uid_of(pod) for role in ("serve", "router") for pod in served.pods(role)} == pods
