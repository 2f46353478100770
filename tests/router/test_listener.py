"""`--host ::` is every address of the machine, wherever the kernel has IPv6 and where it has not."""

import errno
import socket
from typing import Any

import pytest

from kvasir_router.errors import PortInUseError, StartupError
from kvasir_router.listener import listening, url_of


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_two_colons_take_ipv6_and_ipv4() -> None:
    with listening("::", 0, "--port") as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://[::]:{port}"
        assert answers("::1", port)
        assert answers("127.0.0.1", port)


def test_one_ipv6_address_is_just_that() -> None:
    with listening("::1", 0, "--port") as listener:
        port = listener.getsockname()[1]
        assert answers("::1", port)
        assert not answers("127.0.0.1", port)


class _WithoutIpv6(socket.socket):
    """As in a kernel that was booted with ipv6.disable=1, or whose address is not to be had."""

    number = errno.EAFNOSUPPORT

    def __init__(self, family: int = -1, *arguments: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(self.number, "no IPv6 here")
        super().__init__(family, *arguments)


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_two_colons_are_all_of_ipv4_where_the_kernel_has_no_ipv6(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_WithoutIpv6, "number", number)
    monkeypatch.setattr(socket, "socket", _WithoutIpv6)
    with listening("::", 0, "--port") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        assert answers("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize(("host", "number"), [("::1", errno.EAFNOSUPPORT), ("::", errno.EACCES)])
def test_nothing_else_becomes_another_address(host: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_WithoutIpv6, "number", number)
    monkeypatch.setattr(socket, "socket", _WithoutIpv6)
    with pytest.raises(StartupError, match=f"cannot listen on {host}:0"), listening(host, 0, "--port"):
        pass


def test_a_port_that_ipv4_uses_is_in_use() -> None:
    with listening("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f":::{port} is in use"), listening("::", port, "--port"):
            pass
