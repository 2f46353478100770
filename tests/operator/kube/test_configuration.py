"""The way to the API server."""

import pytest

from kvasir_operator.kube.configuration import proxy_of


def test_the_environments_proxy_is_used_unless_it_excludes_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example.com:3128")
    monkeypatch.setenv("no_proxy", "10.96.0.1,.cluster.local")
    assert proxy_of("https://api.example.com:6443") == "http://proxy.example.com:3128"
    assert proxy_of("https://10.96.0.1:443") is None
