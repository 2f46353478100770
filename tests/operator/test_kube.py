"""Lines of a watch as the API server sends them, and the way to it; the rest is tested against a real one."""

import json
from typing import Any

import pytest

from kvasir_operator.errors import KubeApiError, KubeUnavailableError, WatchExpiredError
from kvasir_operator.kube import proxy_of, read_watch_line


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def test_a_change_is_handed_on() -> None:
    assert read_watch_line(line("ADDED", {"kind": "Pod"})) == {"type": "ADDED", "object": {"kind": "Pod"}}


@pytest.mark.parametrize(("code", "expected"), [(410, WatchExpiredError), (500, KubeUnavailableError)])
def test_an_error_in_the_stream_is_raised(code: int, expected: type[KubeApiError]) -> None:
    with pytest.raises(expected, match="too old resource version") as raised:
        read_watch_line(line("ERROR", {"code": code, "message": "too old resource version: 1 (9)"}))
    assert raised.value.status == code


def test_the_environments_proxy_is_used_unless_it_excludes_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example.com:3128")
    monkeypatch.setenv("no_proxy", "10.96.0.1,.cluster.local")
    assert proxy_of("https://api.example.com:6443") == "http://proxy.example.com:3128"
    assert proxy_of("https://10.96.0.1:443") is None
