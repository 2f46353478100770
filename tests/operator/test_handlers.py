"""How kopf is set up: quiet, bounded, with our client's credentials."""

import asyncio

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.handlers import kopf_credentials, kopf_settings
from kvasir_operator.kube.configuration import load_configuration


def test_kopf_writes_nothing_to_the_cluster_and_its_requests_are_bounded() -> None:
    settings = kopf_settings()
    assert not settings.posting.enabled
    assert settings.networking.request_timeout == 30.0


def test_neither_namespaces_nor_crds_are_watched() -> None:
    assert kopf_settings().scanning.disabled


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
