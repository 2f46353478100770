"""The one way in: loopback ports of the machine whose connections go on to the API server and to Prometheus.

    python -m e2e.cluster.rig.relay PID FAMILY

The listeners belong to the machine's network and every onward connection to that of process PID, so nothing inside the
cluster gains a way out.
"""

import asyncio
import ctypes
import os
import sys
from functools import partial

from e2e.cluster.rig.layout import API_PORT, PROMETHEUS_PORT, RELAY_ADDRESS
from e2e.cluster.rig.network import NETWORKS

CLONE_NEWNET = 0x40000000  # sched.h


async def main(pid: int, control_plane: str) -> None:
    servers = [
        await asyncio.start_server(partial(relay, control_plane, port), RELAY_ADDRESS, port)
        for port in (API_PORT, PROMETHEUS_PORT)
    ]
    enter_network_of(pid)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def enter_network_of(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            sys.exit(f"cannot enter the network of process {pid}: {os.strerror(error)}")


async def relay(address: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        onward_reader, onward_writer = await asyncio.open_connection(address, port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side has hung up; closing the other tells it
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), NETWORKS[sys.argv[2]].control_plane))
