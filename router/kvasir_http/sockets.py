"""The sockets that servers listen on, bound before anything else starts, so that a port in use is told first."""

import errno
import socket

BACKLOG = 2048
_ANY_IPV6, _ANY_IPV4 = "::", "0.0.0.0"
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def bound_socket(host: str, port: int) -> socket.socket:
    """`::` stands for every address of the machine, IPv6 and IPv4, on one socket; a kernel that has no IPv6, or none
    switched on, gets 0.0.0.0 instead. Raises OSError.
    """
    if host != _ANY_IPV6:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _bound(family, address)
    try:
        return _bound(socket.AF_INET6, (_ANY_IPV6, port))
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
    return _bound(socket.AF_INET, (_ANY_IPV4, port))


def _bound(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address[0] == _ANY_IPV6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever net.ipv6.bindv6only says
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
