"""`::` is every address of the machine, wherever the kernel has IPv6 and where it has not."""

import errno
import os
import socket
from typing import Any

import pytest

from kvasir_http.sockets import bound_socket


@pytest.mark.parametrize("address", ["::1", "127.0.0.1"])
def test_the_any_address_listens_on_both_families(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Also where new IPv6 sockets are for IPv6 alone (net.ipv6.bindv6only)."""
    original = socket.socket.__init__

    def for_ipv6_alone(self: socket.socket, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.family == socket.AF_INET6 and not options.get("fileno"):
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)

    monkeypatch.setattr(socket.socket, "__init__", for_ipv6_alone)
    with bound_socket("::", 0) as listener:
        listener.listen()
        socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()


@pytest.mark.parametrize(("method", "code"), [("__init__", errno.EAFNOSUPPORT), ("bind", errno.EADDRNOTAVAIL)])
def test_without_ipv6_the_any_address_is_that_of_ipv4(monkeypatch: pytest.MonkeyPatch, method: str, code: int) -> None:
    """The kernel has none (no such family), or it is switched off (no such address)."""
    original = getattr(socket.socket, method)

    def refuse_ipv6(self: socket.socket, *args: Any, **options: Any) -> Any:
        if socket.AF_INET6 in (args[0], self.family if method == "bind" else None):
            raise OSError(code, os.strerror(code))
        return original(self, *args, **options)

    monkeypatch.setattr(socket.socket, method, refuse_ipv6)
    with bound_socket("::", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_one_ipv6_address_is_just_that() -> None:
    with bound_socket("::1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        socket.create_connection(("::1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(("host", "code"), [("::1", errno.EAFNOSUPPORT), ("::", errno.EACCES)])
def test_nothing_else_becomes_another_address(host: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        bound_socket(host, 0)
