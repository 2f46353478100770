"""How kopf is set up: quiet, bounded, with our client's credentials; and which events of a service are news."""

import asyncio
from typing import Any

import kopf
import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.handlers import SeenSpecs, kopf_credentials, kopf_settings
from kvasir_operator.kube.configuration import load_configuration


def test_kopf_writes_nothing_to_the_cluster_and_its_requests_are_bounded() -> None:
    settings = kopf_settings()
    assert not settings.posting.enabled
    assert settings.networking.request_timeout == 30.0
    assert isinstance(settings.watching.server_timeout, int)


def test_kopf_copies_no_object_to_compare_it_later() -> None:
    storage = kopf_settings().persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "llama"}, "spec": {"replicas": 1}})
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None


def test_neither_namespaces_nor_crds_are_watched() -> None:
    assert kopf_settings().scanning.disabled


@pytest.mark.parametrize(
    ("event_type", "metadata", "is_news"),
    [
        ("MODIFIED", {}, False),  # the status
        (None, {}, False),  # the list of a watch that was opened anew
        ("MODIFIED", {"generation": 2}, True),
        ("MODIFIED", {"deletionTimestamp": "2026-01-01T00:00:00Z"}, True),
        ("DELETED", {}, True),
        ("ADDED", {"uid": "another"}, True),
    ],
)
def test_only_what_changed_of_a_services_spec_is_news(
    event_type: str | None, metadata: dict[str, Any], is_news: bool
) -> None:
    specs, first = SeenSpecs(), {"namespace": "models", "name": "llama", "uid": "u", "generation": 1}
    assert specs.is_news("ADDED", first)
    assert specs.is_news(event_type, {**first, **metadata}) is is_news


def test_a_service_that_went_is_forgotten() -> None:
    specs, metadata = SeenSpecs(), {"namespace": "models", "name": "llama", "uid": "u", "generation": 1}
    for event_type in ("ADDED", "DELETED", "ADDED"):
        assert specs.is_news(event_type, metadata)


def test_kopf_gets_the_token_without_its_scheme() -> None:
    async def body() -> tuple[str, str | None, str | None]:
        configuration = Configuration(host="https://127.0.0.1:6443")
        configuration.api_key = {"BearerToken": "bearer secret"}
        credentials = await kopf_credentials(configuration)
        return credentials.server, credentials.scheme, credentials.token

    assert asyncio.run(body()) == ("https://127.0.0.1:6443", "Bearer", "secret")


def test_kopf_takes_the_same_way_through_a_proxy_as_the_client() -> None:
    async def body() -> str | None:
        configuration = Configuration(host="https://127.0.0.1:6443")
        configuration.proxy = "http://proxy.example.com:3128"
        return (await kopf_credentials(configuration)).proxy_url

    assert asyncio.run(body()) == "http://proxy.example.com:3128"


def test_a_pod_uses_its_own_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(Exception, match="a pod's service account"):
        asyncio.run(load_configuration(None))
