"""The sockets that the router listens on: bound before anything else starts, so that a port in use is told first.

`::` stands for every address of the machine, IPv6 and IPv4, on one socket; a kernel without IPv6 gets 0.0.0.0 instead.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

from kvasir_router.errors import PortInUseError, StartupError

_BACKLOG = 2048
_ANY_IPV6, _ANY_IPV4 = "::", "0.0.0.0"
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


@contextlib.contextmanager
def listening(host: str, port: int, flag: str, *, is_shared: bool = False) -> Iterator[socket.socket]:
    """Raises PortInUseError, or StartupError for any other reason. `flag` is what to change then.

    `is_shared`: others who say so may listen there too, and each gets a part of the connections.
    """
    with _bound(host, port, flag, is_shared=is_shared) as listener:
        listener.listen(_BACKLOG)
        yield listener


@contextlib.contextmanager
def reserved(host: str, port: int, flag: str) -> Iterator[socket.socket]:
    """A port on which others listen together, who have it to themselves. Raises as `listening`."""
    with _bound(host, port, flag, is_shared=False) as alone:
        port = alone.getsockname()[1]
    with _bound(host, port, flag, is_shared=True) as shared:
        yield shared


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bound(host: str, port: int, flag: str, *, is_shared: bool) -> socket.socket:
    try:
        return _socket_of(host, port, is_shared=is_shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{host}:{port} is in use; choose another port with {flag}") from error
        raise StartupError(f"cannot listen on {host}:{port} ({flag}): {error}") from error


def _socket_of(host: str, port: int, *, is_shared: bool) -> socket.socket:
    if host != _ANY_IPV6:
        return _socket(host, port, is_shared=is_shared)
    try:
        return _socket(_ANY_IPV6, port, is_shared=is_shared)
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
    return _socket(_ANY_IPV4, port, is_shared=is_shared)


def _socket(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == _ANY_IPV6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever net.ipv6.bindv6only says
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
