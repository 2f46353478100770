"""How kopf is set up: quiet, with server-side filters, and with our client's credentials."""

import asyncio
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.handlers import kopf_credentials, kopf_registry, kopf_settings
from kvasir_operator.kinds import ServiceKey
from kvasir_operator.kube import load_configuration


def test_kopf_writes_nothing_to_the_cluster_and_its_requests_are_bounded() -> None:
    settings = kopf_settings()
    assert not settings.posting.enabled
    assert settings.networking.request_timeout == 30.0
    assert isinstance(settings.watching.server_timeout, int)


def test_neither_namespaces_nor_crds_are_watched() -> None:
    assert kopf_settings().scanning.disabled


def test_nothing_but_startup_free_event_handlers_is_registered() -> None:
    async def configuration() -> Configuration:
        return Configuration()

    registry = kopf_registry(configuration, lambda key: None)
    assert len(registry._watching.get_all_handlers()) == 1
    assert not [*registry._changing.get_all_handlers(), *registry._spawning.get_all_handlers()]
    assert not any(handler.requires_finalizer for handler in registry._changing.get_all_handlers())


@pytest.mark.parametrize(
    ("kind_of_change", "metadata", "num_woken"),
    [
        ("MODIFIED", {}, 1),  # the status
        ("MODIFIED", {"generation": 2}, 2),
        ("MODIFIED", {"deletionTimestamp": "2026-01-01T00:00:00Z"}, 2),
        ("DELETED", {}, 2),
        ("ADDED", {"uid": "another"}, 2),
    ],
)
def test_a_service_is_woken_by_what_is_news_of_its_spec(
    kind_of_change: str, metadata: dict[str, Any], num_woken: int
) -> None:
    async def configuration() -> Configuration:
        return Configuration()

    async def body() -> list[ServiceKey]:
        woken: list[ServiceKey] = []
        [handler] = kopf_registry(configuration, woken.append)._watching.get_all_handlers()
        first = {"namespace": "models", "name": "llama", "uid": "u", "generation": 1}
        for kind, seen in (("ADDED", first), (kind_of_change, {**first, **metadata})):
            await handler.fn(type=kind, body={"metadata": seen})
        return woken

    assert asyncio.run(body()) == [ServiceKey("models", "llama")] * num_woken


def test_kopf_gets_the_token_without_its_scheme() -> None:
    async def body() -> tuple[str, str | None, str | None]:
        configuration = Configuration(host="https://127.0.0.1:6443")
        configuration.api_key = {"BearerToken": "bearer secret"}
        credentials = await kopf_credentials(configuration)
        return credentials.server, credentials.scheme, credentials.token

    assert asyncio.run(body()) == ("https://127.0.0.1:6443", "Bearer", "secret")


def test_a_pod_uses_its_own_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(Exception, match="a pod's service account"):
        asyncio.run(load_configuration(None))
