"""What the client makes of Prometheus's answers and silences."""

import asyncio
import ssl
import subprocess
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvasir_operator.autoscaling.prometheus import Prometheus, PrometheusAccess, Value
from kvasir_operator.errors import PrometheusError

from .fake_prometheus import FakePrometheus, vector


def answered(
    body: Any, status: int = 200, tls: ssl.SSLContext | None = None, **access: Any
) -> tuple[list[Value], FakePrometheus]:
    async def ask() -> tuple[list[Value], FakePrometheus]:
        async with FakePrometheus(lambda _: (body, status), tls) as server:
            prometheus = Prometheus(PrometheusAccess(server.url, **access), timeout_seconds=5)
            try:
                return await prometheus.query("up"), server
            finally:
                await prometheus.close()

    return asyncio.run(ask())


def test_an_instant_vector_is_read() -> None:
    values, server = answered(vector(({"pod": "a"}, 1.5), ({}, 2)))
    assert values == [Value({"pod": "a"}, 1.5), Value({}, 2.0)]
    assert server.asked == ["up"]


def test_values_that_are_no_numbers_are_left_out() -> None:
    assert answered(vector(({}, "NaN"), ({}, "+Inf"), ({"pod": "a"}, 1)))[0] == [Value({"pod": "a"}, 1.0)]


def test_native_histograms_are_left_out() -> None:
    body = vector(({"pod": "a"}, 1))
    body["data"]["result"].append({"metric": {}, "histogram": [0, {"count": "3", "sum": "2", "buckets": []}]})
    assert answered(body)[0] == [Value({"pod": "a"}, 1.0)]


@pytest.mark.parametrize(
    ("access", "files", "expected"),
    [
        ("token_file", {"token": "secret\n"}, {"Authorization": "Bearer secret"}),
        (
            "basic_auth_folder",
            {"username": "me\n", "password": "s:ü"},
            {"Authorization": f"Basic {b64encode('me:s:ü'.encode()).decode()}"},
        ),
        (
            "headers_folder",
            {"X-Scope-OrgID": "team|other\n", "X-Key": "1"},
            {"X-Scope-OrgID": "team|other", "X-Key": "1"},
        ),
    ],
)
def test_credentials_go_along_as_they_are_in_their_files_now(
    access: str, files: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    """Mounted as the kubelet mounts a Secret: links to a folder that a renewal changes for another."""
    (tmp_path / "..data").mkdir()
    for name, text in files.items():
        (tmp_path / "..data" / name).write_text(text)
        (tmp_path / name).symlink_to(tmp_path / "..data" / name)
    _, server = answered(vector(), **{access: tmp_path / "token" if access == "token_file" else tmp_path})
    assert {name: server.headers[0].get(name) for name in expected} == expected
    assert "..data" not in server.headers[0]


@pytest.mark.parametrize(("no_proxy", "is_asked"), [("", True), ("localhost,.example", False)])
def test_the_environments_proxy_is_used_but_for_what_it_excludes(
    no_proxy: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> list[str]:
        async with FakePrometheus(lambda _: (vector(), 200)) as proxy:
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
            monkeypatch.setenv("NO_PROXY", no_proxy)
            prometheus = Prometheus(PrometheusAccess("http://prometheus.example:9090"), timeout_seconds=5)
            try:
                await prometheus.query("up")
            except PrometheusError:
                assert not is_asked
            finally:
                await prometheus.close()
            return proxy.asked

    assert asyncio.run(ask()) == ["up"] * is_asked


async def no_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"SSH-2.0-OpenSSH_10\r\n")
    await writer.drain()
    writer.close()


def test_the_token_is_in_no_error(tmp_path: Path) -> None:
    """What answers without HTTP is an error of aiohttp that holds the request."""
    file = tmp_path / "token"
    file.write_text("secret")

    async def ask() -> str:
        async with await asyncio.start_server(no_http, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            prometheus = Prometheus(PrometheusAccess(url, token_file=file), timeout_seconds=5)
            with pytest.raises(PrometheusError) as raised:
                await prometheus.query("up")
            await prometheus.close()
            return str(raised.value)

    message = asyncio.run(ask())
    assert "SSH-2.0" in message
    assert "secret" not in message


def test_without_a_token_nothing_is_said() -> None:
    assert "Authorization" not in answered(vector())[1].headers[0]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"status": "error", "error": "parse error"}, 400, "refused 'up': HTTP 400: parse error"),
        ({"status": "success", "data": {}}, 200, "no instant vector"),
        ({"status": "success", "data": {"result": [{"metric": {}}]}}, 200, "no instant vector"),
        ({"status": "success", "data": {"result": [{"metric": None, "value": [0, "1"]}]}}, 200, "no instant vector"),
        (["nothing"], 200, "no instant vector"),
        ("<html>", 502, "did not answer"),
    ],
)
def test_what_is_no_answer_says_what_was_asked_and_seen(body: Any, status: int, message: str) -> None:
    with pytest.raises(PrometheusError, match=message):
        answered(body, status)


def test_a_token_that_is_not_there_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(PrometheusError, match="No such file"):
        answered(vector(), token_file=tmp_path / "token")


def test_nobody_who_listens_is_no_answer() -> None:
    async def ask() -> None:
        prometheus = Prometheus(PrometheusAccess("http://127.0.0.1:9"))
        try:
            await prometheus.query("up")
        finally:
            await prometheus.close()

    with pytest.raises(PrometheusError, match=r"is prometheus\.url right"):
        asyncio.run(ask())


@dataclass(frozen=True)
class _Tls:
    """A server's side, and the authority that signed its certificate."""

    server: ssl.SSLContext
    ca_file: Path


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> _Tls:
    """Of an authority of its own, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    begin = "openssl req -x509 -newkey rsa:2048 -nodes -days 1"
    for options in (
        "-subj /CN=authority -addext keyUsage=critical,keyCertSign -keyout ca.key -out ca.crt",
        "-subj /CN=server -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=CA:FALSE"
        " -CA ca.crt -CAkey ca.key -keyout tls.key -out tls.crt",
    ):
        subprocess.run(f"{begin} {options}".split(), check=True, capture_output=True, cwd=folder)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return _Tls(server, folder / "ca.crt")


def test_over_https_the_authority_of_the_settings_is_trusted(tls: _Tls) -> None:
    assert answered(vector(({}, 1)), tls=tls.server, ca_file=tls.ca_file)[0] == [Value({}, 1.0)]


def test_over_https_nobody_else_is_trusted(tls: _Tls) -> None:
    with pytest.raises(PrometheusError, match="CERTIFICATE_VERIFY_FAILED"):
        answered(vector(), tls=tls.server)


def test_over_https_without_verification_anybody_is_trusted(tls: _Tls) -> None:
    assert answered(vector(({}, 1)), tls=tls.server, is_verified=False)[0] == [Value({}, 1.0)]


def test_certificates_that_cannot_be_read_are_no_answer_until_they_can(tls: _Tls, tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("none yet")

    async def ask() -> list[Value]:
        async with FakePrometheus(lambda _: (vector(({}, 1)), 200), tls.server) as server:
            prometheus = Prometheus(PrometheusAccess(server.url, ca_file=file), timeout_seconds=5)
            try:
                with pytest.raises(PrometheusError, match=r"ca\.crt holds no certificates"):
                    await prometheus.query("up")
                file.write_bytes(tls.ca_file.read_bytes())
                return await prometheus.query("up")
            finally:
                await prometheus.close()

    assert asyncio.run(ask()) == [Value({}, 1.0)]
