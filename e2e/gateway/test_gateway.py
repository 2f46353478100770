"""Verdict by traffic: one endpoint for several services that come, go, change their mode and claim one name."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from e2e.conftest import Deploy, StartLoad
from e2e.gateways import LiveGateway, installed_gateway
from e2e.helm.helm import Helm
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster
from e2e.traffic.answers import Answer, answers
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

HERE = Path(__file__).parent
LARGE, SMALL, THIRD = (HERE / f"{name}.yaml" for name in ("large", "small", "third"))
LARGE_MODEL, SMALL_MODEL = "kvasir-python-7m", "kvasir-python-700k"
NUM_TOKENS = 200
FOLLOWED_WITHIN_SECONDS = 30.0


@pytest.fixture(scope="module")
def gateway(kvasir: Helm, live_cluster: LiveCluster) -> Iterator[LiveGateway]:
    with installed_gateway(kvasir, live_cluster) as installed:
        yield installed


def listed(client: openai.OpenAI) -> set[str]:
    return {model.id for model in client.models.list()}


def wait_listed(client: openai.OpenAI, expected: set[str]) -> None:
    what = f"the gateway to list {sorted(expected)}"
    wait_until(lambda: listed(client) == expected, FOLLOWED_WITHIN_SECONDS, what, POLL_SECONDS)


def first_tokens(client: openai.OpenAI, model: str, answer: Answer) -> str:
    """The beginning of an answer by this name."""
    made = client.completions.create(
        model=model, prompt=answer.prompt_token_ids, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
    )
    return made.choices[0].text


def refused(condition: KubeObject) -> KubeObject | None:
    return condition if condition.get("reason") == "ModelNameTaken" else None


def test_one_endpoint_serves_all_services_and_follows_them_as_they_come_and_go(
    gateway: LiveGateway, deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    large, small = deploy(LARGE), deploy(SMALL)
    of_large, of_small = answers(NUM_TOKENS, LARGE_MODEL), answers(NUM_TOKENS, SMALL_MODEL)
    for service in (large, small):
        service.wait_ready()
    lives, both = gateway.lives(), {LARGE_MODEL, SMALL_MODEL, "python"}
    assert large.url == small.url
    assert large.pods("router") == small.pods("router") == []
    with (
        start_load(large, of_large, num_clients=3, name="clients-of-large") as clients_of_large,
        start_load(small, of_small, num_clients=3, name="clients-of-small") as clients_of_small,
        gateway.client() as client,
    ):
        assert listed(client) == both
        assert of_large[0].text.startswith(first_tokens(client, "python", of_large[0]))
        third = deploy(THIRD)
        wait_listed(client, both | {"third"})  # before it has an engine
        third.wait_ready()
        assert of_small[0].text.startswith(first_tokens(client, "third", of_small[0]))
        third.delete()
        wait_listed(client, both)
        with pytest.raises(openai.NotFoundError, match="third"):
            first_tokens(client, "third", of_small[0])
        for model, clients in ((LARGE_MODEL, clients_of_large), (SMALL_MODEL, clients_of_small)):
            clients.wait_streams(3)
            verdict = clients.stop()
            verdicts.add(f"gateway: {model}, while a third service came and went", verdict)
            assert not verdict.failures, verdict
    assert gateway.lives() == lives


def test_a_name_stays_the_first_services_until_that_lets_go_of_it(
    gateway: LiveGateway, deploy: Deploy, verdicts: Verdicts
) -> None:
    first = deploy(SMALL)
    second = deploy(THIRD, model={"source": f"file:///models/{SMALL_MODEL}", "name": SMALL_MODEL})
    answer = answers(NUM_TOKENS, SMALL_MODEL)[0]
    first.wait_ready()
    refusal = second.wait_condition("Ready", refused, 60)
    assert f"'{SMALL_MODEL}' belongs to service {first.namespace}/{first.name}" in refusal["message"]
    with gateway.client() as client:
        assert answer.text.startswith(first_tokens(client, SMALL_MODEL, answer))
        first.delete()
        second.wait_ready()
        assert answer.text.startswith(first_tokens(client, SMALL_MODEL, answer))
    verdicts.add("gateway: a name that two services claim", note="the later one is refused, and served once it is free")


def test_a_service_goes_behind_the_gateway_and_back_without_a_failed_stream(
    gateway: LiveGateway, deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    own_router = {"replicas": 1, "resources": {"cpu": "100m", "memory": "256Mi"}}
    service = deploy(SMALL, router=own_router)
    service.wait_ready()
    expected, own_url = answers(NUM_TOKENS, SMALL_MODEL), service.url
    with start_load(service, expected, num_clients=3, name="clients-of-its-own-router") as before:
        service.patch({"router": {"mode": "gateway", "replicas": None, "resources": None}})
        wait_until(lambda: service.url != own_url, 60, "the gateway's address", POLL_SECONDS)
        with start_load(service, expected, num_clients=3, name="clients-of-the-gateway") as after:
            of_own = before.stop()
            wait_until(lambda: not service.pods("router"), 120, "the router to be gone", POLL_SECONDS)
            service.wait_ready()
            after.wait_streams(6)
            of_gateway = after.stop()
    verdicts.add("gateway: a service's own router, until the gateway has it", of_own)
    verdicts.add("gateway: the gateway, while engines learn to believe it", of_gateway)
    assert not of_own.failures, of_own
    assert not of_gateway.failures, of_gateway
    service.patch({"router": {"mode": "dedicated", **own_router}})
    wait_until(lambda: service.url == own_url, 60, "the router's address", POLL_SECONDS)
    service.wait_ready()
    with start_load(service, expected, num_clients=3, name="clients-of-its-router-again") as again:
        verdict = again.stop()
    verdicts.add("gateway: a router of its own again", verdict)
    assert not verdict.failures, verdict
