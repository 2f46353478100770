"""What a user does first: helm install, kubectl apply of the example, and a chat by the OpenAI client."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.conftest import install_operator
from e2e.helm.helm import RELEASE, Helm
from e2e.live_cluster import SYSTEM, KubeObject, LiveCluster, LiveService, holds, is_pod_ready, role_of
from e2e.traffic.answers import chat_answer
from e2e.verdicts import Verdicts
from e2e.watch import State, Watch, watching
from openai import OpenAI

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
QUESTION = "Write a function that returns the factorial of n."
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def namespace(live_cluster: LiveCluster) -> Iterator[str]:
    with live_cluster.namespace("quickstart") as name:
        yield name


@pytest.fixture(scope="module")
def service(live_cluster: LiveCluster, namespace: str) -> LiveService:
    return LiveService(live_cluster, namespace, "quickstart", "quickstart")


@pytest.fixture(scope="module")
def expected() -> str:
    return chat_answer(QUESTION, NUM_TOKENS)


def test_helm_installs_the_operator(live_helm: Helm, verdicts: Verdicts) -> None:
    if any(release["namespace"] == SYSTEM for release in live_helm.releases()):
        live_helm.uninstall(SYSTEM)
    started = time.time()
    install_operator(live_helm)
    verdicts.add("quickstart: helm install", until_operator_ready=time.time() - started)
    [release] = [each for each in live_helm.releases() if each["namespace"] == SYSTEM]
    assert release["status"] == "deployed"
    live_helm.run("test", RELEASE, "--namespace", SYSTEM, "--timeout=100s")


def test_the_example_answers_as_hugging_face_does(service: LiveService, expected: str, verdicts: Verdicts) -> None:
    cluster, namespace = service.cluster, service.namespace
    with (
        watching(cluster, "deployments", namespace) as deployments,
        watching(cluster, "pods", namespace) as pods,
        watching(cluster, "inferenceservices", namespace) as services,
    ):
        applied_at = time.time()
        cluster.kubectl("apply", f"--namespace={namespace}", f"--filename={EXAMPLE}")
        moments = milestones(deployments, pods, services)
        cluster.kubectl("wait", "--for=condition=Ready", f"--namespace={namespace}", "inferenceservice/quickstart")
        with service.port_forward() as url:
            text, moments["first_token"] = chat(url)
    since_apply = {name: moment - applied_at for name, moment in moments.items()}
    verdicts.add("quickstart: seconds since kubectl apply", None, "", **since_apply)
    assert text == expected


def test_the_service_outlives_its_operator(service: LiveService, live_helm: Helm, expected: str) -> None:
    before = service.staying_uids("serve", "router")
    live_helm.uninstall(SYSTEM)
    with service.port_forward() as url:
        assert chat(url)[0] == expected
    install_operator(live_helm)
    service.wait_ready()
    assert service.staying_uids("serve", "router") == before


def milestones(deployments: Watch, pods: Watch, services: Watch) -> dict[str, float]:
    """When each was reached, in seconds since the epoch; those of pods are of engine and router both."""
    return {
        "children_created": deployments.first(lambda state: len(state) == 2, 60, "two Deployments"),
        "pods_created": pods.first(lambda state: len(state) == 2, 60, "two pods"),
        "pods_scheduled": pods.first(both(lambda pod: holds(pod, "PodScheduled")), 60, "both pods to be scheduled"),
        "containers_started": pods.first(both(has_started), 120, "both pods' containers to start"),
        "router_ready": pods.first(is_role_ready("router"), 60, "the router to be ready"),
        "engine_ready": pods.first(is_role_ready("serve"), 120, "the engine to be ready"),
        "status_ready": services.first(lambda state: any(holds(obj, "Ready") for obj in state.values()), 60, "Ready"),
    }


def both(is_so: Callable[[KubeObject], bool]) -> Callable[[State], bool]:
    return lambda state: len(state) == 2 and all(map(is_so, state.values()))


def has_started(pod: KubeObject) -> bool:
    containers = pod["status"].get("containerStatuses", [])
    return bool(containers) and all("running" in each["state"] for each in containers)


def is_role_ready(role: str) -> Callable[[State], bool]:
    return lambda state: any(role_of(pod) == role and is_pod_ready(pod) for pod in state.values())


def chat(url: str) -> tuple[str, float]:
    """The streamed answer, and when its first token came."""
    chunks = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60).chat.completions.create(
        model="quickstart", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=NUM_TOKENS,
        stream=True,
    )  # fmt: skip
    texts: list[str] = []
    came_at: list[float] = []
    for chunk in chunks:
        texts.append(chunk.choices[0].delta.content or "")
        came_at += [time.time()] if texts[-1] else []
    return "".join(texts), came_at[0]
