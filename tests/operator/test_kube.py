"""Lines of a watch as the API server sends them; the rest of the seam is tested against a real one."""

import json
from typing import Any

import pytest

from kvasir_operator.errors import KubeApiError, KubeUnavailableError, WatchExpiredError
from kvasir_operator.kube import read_watch_line


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def test_a_change_is_handed_on() -> None:
    assert read_watch_line(line("ADDED", {"kind": "Pod"})) == {"type": "ADDED", "object": {"kind": "Pod"}}


@pytest.mark.parametrize(("code", "expected"), [(410, WatchExpiredError), (500, KubeUnavailableError)])
def test_an_error_in_the_stream_is_raised(code: int, expected: type[KubeApiError]) -> None:
    with pytest.raises(expected, match="too old resource version") as raised:
        read_watch_line(line("ERROR", {"code": code, "message": "too old resource version: 1 (9)"}))
    assert raised.value.status == code
