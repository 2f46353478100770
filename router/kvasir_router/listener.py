"""The sockets that the router listens on, and what is said where one cannot be had."""

import contextlib
import errno
import socket
from collections.abc import Iterator

from kvasir_http.sockets import BACKLOG, bound_socket
from kvasir_router.errors import PortInUseError, StartupError


@contextlib.contextmanager
def listening(host: str, port: int, flag: str, *, is_shared: bool = False) -> Iterator[socket.socket]:
    """Raises PortInUseError, or StartupError for any other reason. `flag` is what to change then.

    `is_shared`: others who say so may listen there too, and each gets a part of the connections.
    """
    with _bound(host, port, flag, is_shared=is_shared) as listener:
        listener.listen(BACKLOG)
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
        return bound_socket(host, port, is_shared=is_shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{host}:{port} is in use; choose another port with {flag}") from error
        raise StartupError(f"cannot listen on {host}:{port} ({flag}): {error}") from error
