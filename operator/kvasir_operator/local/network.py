"""Loopback addresses for local pods: one network 127.77.N.0/24 a run, one address of it a pod.

A network is held by a socket for as long as the run lasts, so that two runs on one machine never share an address.
"""

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from kvasir_operator.errors import AddressInUseError, LocalRunError

_NUM_NETWORKS = 256
_FIRST_TWO_OCTETS = "127.77"
# Where the socket sits that holds a network: the address that no pod gets.
_LOCK_HOST, _LOCK_PORT = 254, 7700
KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _HIGHEST_PORT = 10_000, 65_535


class LoopbackNetwork:
    """A run's own addresses."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._hosts = count(1)

    def next_address(self) -> str:
        """An address that no pod of any run has. Raises LocalRunError when all are given out."""
        host = next(self._hosts)
        if host >= _LOCK_HOST:
            raise LocalRunError(
                f"the manifests ask for more than {_LOCK_HOST - 1} pods, local mode has no more addresses"
            )
        return f"{self._prefix}.{host}"


@contextmanager
def reserve_network() -> Iterator[LoopbackNetwork]:
    """The first network that no other run holds. Raises LocalRunError when there is none."""
    for number in range(_NUM_NETWORKS):
        prefix = f"{_FIRST_TWO_OCTETS}.{number}"
        lock = _bound_socket(f"{prefix}.{_LOCK_HOST}", _LOCK_PORT)
        if lock is not None:
            with lock:
                yield LoopbackNetwork(prefix)
            return
    raise LocalRunError(
        f"{_NUM_NETWORKS} runs of `kvasir-operator local` hold every network of {_FIRST_TWO_OCTETS}.0.0/16"
    )


def require_free(address: str, port: int, wanted_by: str, advice: str) -> None:
    """Raises AddressInUseError when another program listens there."""
    probe = _bound_socket(address, port)
    if probe is None:
        raise AddressInUseError(
            f"{address}:{port} is in use by another program, and {wanted_by} must listen there: {advice}"
        )
    probe.close()


def usable_port(address: str, preferred: int) -> int:
    """`preferred`, or a free one where a program that listens on every address of the machine has taken it."""
    probe = _bound_socket(address, preferred)
    if probe is None:
        return free_port(address)
    probe.close()
    return preferred


def free_port(address: str, kernels_ports: Path = KERNELS_PORTS) -> int:
    """A port on which nobody listens, and which the kernel gives to nobody who asks for any.

    One from the kernel's own range may be given to another program, an engine's transfers say, before ours listens.
    Only where that range leaves none is it one of those.
    """
    first, last = map(int, kernels_ports.read_text().split())
    others = [*range(_LOWEST_PORT, first), *range(max(last + 1, _LOWEST_PORT), _HIGHEST_PORT + 1)]
    random.shuffle(others)
    for port in (*others, 0):
        probe = _bound_socket(address, port)
        if probe is not None:
            with probe:
                chosen: int = probe.getsockname()[1]
                return chosen
    raise LocalRunError(f"no port of {address} is free")


def _bound_socket(address: str, port: int) -> socket.socket | None:
    """None when somebody listens there; a port in TIME_WAIT counts as free, as it does for the servers that follow."""
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
        # Two sockets that do not listen may share an address with SO_REUSEADDR; a listening one may not.
        bound.listen(1)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise LocalRunError(f"cannot listen on {address}:{port}: {error.strerror}") from error
    return bound
