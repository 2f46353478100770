"""The one way in: a loopback port of the machine whose connections go on to the cluster's API server.

    python -m rig.relay PID

The listener belongs to the machine's network and every onward connection to that of process PID, so nothing inside the
cluster gains a way out.
"""

import asyncio
import ctypes
import os
import sys

from rig.layout import API_PORT, CONTROL_PLANE_ADDRESS, RELAY_ADDRESS

CLONE_NEWNET = 0x40000000  # sched.h


async def main(pid: int) -> None:
    server = await asyncio.start_server(relay, RELAY_ADDRESS, API_PORT)
    enter_network_of(pid)
    async with server:
        await server.serve_forever()


def enter_network_of(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            sys.exit(f"cannot enter the network of process {pid}: {os.strerror(error)}")


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        onward_reader, onward_writer = await asyncio.open_connection(CONTROL_PLANE_ADDRESS, API_PORT)
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
    asyncio.run(main(int(sys.argv[1])))
