"""The installation's gateway, as the scenarios act on it: the shared router of services behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
from e2e.conftest import install_operator
from e2e.helm.helm import Helm
from e2e.live_cluster import SYSTEM, KubeObject, LiveCluster, uid_of

NAME = "kvasir-gateway"
PODS = "app.kubernetes.io/component=gateway"
VALUES = "gateway.enabled=true,gateway.resources.requests.cpu=100m,gateway.resources.requests.memory=256Mi"


@dataclass(frozen=True)
class LiveGateway:
    cluster: LiveCluster

    def pods(self) -> list[KubeObject]:
        return self.cluster.list("pods", SYSTEM, PODS)

    def lives(self) -> set[tuple[str, int]]:
        """Each of its containers by its pod's uid and the number of its restarts."""
        return {
            (uid_of(pod), each["restartCount"]) for pod in self.pods() for each in pod["status"]["containerStatuses"]
        }

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        """OpenAI's, of its one endpoint; what fails is not tried again."""
        with (
            self.cluster.port_forward(NAME, SYSTEM) as url,
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            yield client


@contextmanager
def installed_gateway(helm: Helm, cluster: LiveCluster, *values: str) -> Iterator[LiveGateway]:
    """The release with a gateway; put right again at the end."""
    install_operator(helm, f"--set={','.join((VALUES, *values))}")
    try:
        yield LiveGateway(cluster)
    finally:
        install_operator(helm)
