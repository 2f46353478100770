"""Answers of the API server as our own errors, and lines of a watch."""

import json
from typing import Any

import aiohttp
import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvasir_operator.errors import (
    AdmissionFailedError,
    KindNotServedError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
    ServerFailedError,
    WatchExpiredError,
)
from kvasir_operator.kube.answers import api_error, read_object, read_watch_line, translated


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def test_a_change_is_handed_on() -> None:
    assert read_watch_line(line("ADDED", {"kind": "Pod"})) == {"type": "ADDED", "object": {"kind": "Pod"}}


@pytest.mark.parametrize(("code", "expected"), [(410, WatchExpiredError), (500, KubeUnavailableError)])
def test_an_error_in_the_stream_is_raised(code: int, expected: type[KubeApiError]) -> None:
    with pytest.raises(expected, match="too old resource version") as raised:
        read_watch_line(line("ERROR", {"code": code, "message": "too old resource version: 1 (9)"}))
    assert raised.value.status == code


def test_what_the_request_proved_itself_with_is_in_no_error() -> None:
    headers = CIMultiDictProxy(CIMultiDict(Authorization="Bearer secret"))
    url = URL("https://api/version")

    with (
        pytest.raises(KubeUnavailableError, match=r"did not answer: ClientResponseError: 400, .*odd") as raised,
        translated(),
    ):
        raise aiohttp.ClientResponseError(aiohttp.RequestInfo(url, "GET", headers, url), (), status=400, message="odd")
    assert "secret" not in str(raised.value)


def test_an_answer_that_is_no_object_is_none() -> None:
    with pytest.raises(KubeUnavailableError, match="did not answer"), translated():
        msgspec.json.decode(b"<html>")


@pytest.mark.parametrize("body", [b"null", b"[]", b"5", b"{}", b'{"metadata": 1}'])
def test_an_answer_that_is_another_object_is_none_of_the_api_servers(body: bytes) -> None:
    with pytest.raises(KubeUnavailableError, match="none of its objects"):
        read_object(body, "metadata")
    with pytest.raises(KubeUnavailableError, match="none of its objects"):
        read_watch_line(body)


def answered(status: int, message: str, **details: str) -> KubeApiError:
    return api_error(status, "Reason", json.dumps({"kind": "Status", "message": message, "details": details}))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (500, 'Internal error occurred: failed calling webhook "policy.example.com": connect: connection refused'),
        (403, 'admission webhook "policy.example.com" denied the request: no hostPath'),
        (400, 'admission webhook "policy.example.com" denied the request without explanation'),
        (422, "deployments.apps is forbidden: ValidatingAdmissionPolicy 'policy.example.com' with binding 'b' denied"),
    ],
)
def test_a_webhook_or_policy_that_denies_or_fails_is_no_failure_of_the_api_server(status: int, message: str) -> None:
    error = answered(status, message)
    assert isinstance(error, AdmissionFailedError)
    assert "policy.example.com" in str(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered(404, 'pods "a" not found', name="a", kind="pods"), ObjectNotFoundError),
        (answered(404, "the server could not find the requested resource"), KindNotServedError),
        (api_error(404, "Not Found", "404 page not found\n"), KindNotServedError),
        (answered(500, "etcdserver: request timed out"), ServerFailedError),
        (answered(503, "the server is currently unable to handle the request"), KubeUnavailableError),
        (answered(403, "exceeded quota: gpus"), KubeForbiddenError),
        (answered(422, "spec.replicas: must be at least 0"), ObjectRefusedError),
        (api_error(500, "Internal Server Error", "<html>oops</html>"), ServerFailedError),
        (api_error(507, "Insufficient Storage", ""), ServerFailedError),
        (api_error(413, "Payload Too Large", "<html>nginx</html>"), ObjectRefusedError),
        (api_error(415, "Unsupported Media Type", "[]"), ObjectRefusedError),
        (api_error(451, "Unavailable For Legal Reasons", "null"), ObjectRefusedError),
        (answered(409, "the object has been modified"), ObjectConflictError),
        (answered(429, "storage is (re)initializing"), KubeUnavailableError),
        (api_error(401, "Unauthorized", ""), KubeUnavailableError),
        (api_error(302, "Found", ""), KubeUnavailableError),
        (answered(405, "create not allowed while custom resource definition is terminating"), ObjectRefusedError),
    ],
)
def test_each_answer_has_its_error(error: KubeApiError, expected: type[KubeApiError]) -> None:
    assert type(error) is expected
