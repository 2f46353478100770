"""The way to the API server."""

import pytest

from kvasir_operator.kube.configuration import proxy_of

PROXY = "http://proxy.example.com:3128"


def test_the_environments_proxy_is_used_unless_it_excludes_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", "10.96.0.1,.cluster.local")
    assert proxy_of("https://api.example.com:6443") == PROXY
    assert proxy_of("https://10.96.0.1:443") is None


@pytest.mark.parametrize(
    ("no_proxy", "server"),
    [
        ("fd00::1,.cluster.local", "https://[fd00::1]:443"),
        ("[fd00::1]", "https://[fd00::1]:443"),
        ("[fd00::1]:443", "https://[fd00::1]:443"),
        ("fd00::a", "https://[FD00::A]:443"),
        ("api.example.com:6443", "https://api.example.com:6443"),
        ("*", "https://[fd00::1]:443"),
    ],
)
def test_no_proxy_may_name_the_api_server_with_its_port_and_an_ipv6_address_bare(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, server: str
) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_of(server) is None


@pytest.mark.parametrize("no_proxy", ["fd00::2", "fd00::", "1", ""])
def test_another_ipv6_address_is_reached_by_the_proxy(monkeypatch: pytest.MonkeyPatch, no_proxy: str) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_of("https://[fd00::1]:443") == PROXY
