"""What it costs to move KV blocks from one engine's process to another's on this machine.

    python benchmarks/disaggregation.py

prints a table for several page sizes: a plain TCP socket over loopback as the ceiling, pulls through the real transfer
agents and NIXL with and without checksums, and how much of a pull is hidden behind a prefill that writes its blocks in
chunks (the prefill is a wait, so what is shown is the protocol's share, not that of two processes on the same cores).
"""

import argparse
import itertools
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import BeginOffer, BeginPull, Land, OfferBlocks, OfferedBlock, Place, PullEnded
from kvasir_runtime.transfer.messages import Identity
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.side_channel import SideChannel

IDENTITY = Identity(model="m", revision="", dtype="uint8", block_size=16, kv_layout="pages", hash_rule="numbers")
HOST = "127.0.0.1"
NUM_CHUNKS = 8
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    num_blocks: int
    page_bytes: int
    checksums: bool

    @property
    def hashes(self) -> list[bytes]:
        return [number.to_bytes(16, "little") for number in range(self.num_blocks)]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.page_bytes


@dataclass(frozen=True)
class Order:
    """To the keeping process: offer all blocks under the key, so many seconds from one chunk to the next."""

    key: str
    chunk_seconds: float


@contextmanager
def running_agent(name: str, shape: Shape, wake: Callable[[], None]) -> Iterator[tuple[TransferAgent, SideChannel]]:
    buffer = torch.randint(0, 256, (shape.num_blocks, shape.page_bytes), dtype=torch.uint8)
    channel = SideChannel(HOST, 0)
    agent = TransferAgent(
        NixlConnector(name, buffer), channel, IDENTITY, Place(engine_id=name, host=HOST, port=channel.port),
        page_bytes=shape.page_bytes, lease_seconds=60, timeout_seconds=60, checksums=shape.checksums, wake_core=wake,
    )  # fmt: skip
    agent.start()
    yield agent, channel
    agent.close()
    channel.close()


def keep(shape: Shape, orders: Connection) -> None:
    """The prefill side's process."""
    with running_agent("keeper", shape, lambda: None) as (agent, channel):
        orders.send(channel.port)
        while (order := orders.recv()) is not None:
            agent.post(BeginOffer(order.key, order.key))
            blocks = [OfferedBlock(block_hash, (number,)) for number, block_hash in enumerate(shape.hashes)]
            step = -(-len(blocks) // NUM_CHUNKS)
            for first in range(0, len(blocks), step):
                time.sleep(order.chunk_seconds)
                agent.post(OfferBlocks(order.key, blocks[first : first + step], first + step >= len(blocks)))
            orders.send(time.monotonic())  # one clock for all processes of a machine


class Puller:
    def __init__(
        self, agent: TransferAgent, port: int, shape: Shape, woken: threading.Event, orders: Connection
    ) -> None:
        self._agent = agent
        self._port = port
        self._shape = shape
        self._woken = woken
        self._orders = orders
        self._numbers = itertools.count()

    def seconds(self, chunk_seconds: float, *, meanwhile: bool) -> tuple[float, float]:
        """(from the first chunk's beginning, from the last chunk's end) until all blocks are here."""
        key = f"k{next(self._numbers)}"
        began = time.monotonic()
        if meanwhile:
            self._begin(key)
        self._orders.send(Order(key, chunk_seconds))
        if not meanwhile:
            written = self._orders.recv()
            self._begin(key)
        self._await_end()
        ended = time.monotonic()
        if meanwhile:
            written = self._orders.recv()
        return ended - began, ended - written

    def _begin(self, key: str) -> None:
        hashes = self._shape.hashes
        wish = BeginPull(request_id=key, host=HOST, port=self._port, key=key, hashes=hashes, first=0)
        self._agent.post(wish, Land(key, {number: (number,) for number in range(len(hashes))}))

    def _await_end(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            for event in self._agent.take():
                assert isinstance(event, PullEnded)
                assert event.failure is None, event.failure.message
                return


@contextmanager
def pulling(shape: Shape) -> Iterator[Puller]:
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=keep, args=(shape, theirs))
    process.start()
    port, woken = ours.recv(), threading.Event()
    with running_agent("puller", shape, woken.set) as (agent, _):
        puller = Puller(agent, port, shape, woken, ours)
        puller.seconds(0, meanwhile=False)  # connections are made by the first
        yield puller
    ours.send(None)
    process.join()


def send_all(num_bytes: int, num_rounds: int, port: int) -> None:
    payload = bytes(num_bytes)
    with socket.create_connection((HOST, port)) as connection:
        for _ in range(num_rounds):
            connection.recv(1)
            connection.sendall(payload)


def socket_seconds(num_bytes: int, num_rounds: int) -> float:
    """The median of rounds: one byte to ask, then all bytes into memory that is there already."""
    with socket.create_server((HOST, 0)) as listener:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=send_all, args=(num_bytes, num_rounds, listener.getsockname()[1]))
        process.start()
        connection, _ = listener.accept()
        with connection:
            view, rounds = memoryview(bytearray(num_bytes)), []
            for _ in range(num_rounds):
                began, num_received = time.monotonic(), 0
                connection.sendall(b"g")
                while num_received < num_bytes:
                    num_received += connection.recv_into(view[num_received:])
                rounds.append(time.monotonic() - began)
        process.join()
    return statistics.median(rounds[1:])


def gigabytes(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f}"


def row(page_bytes: int, total_bytes: int, num_rounds: int) -> str:
    num_blocks = total_bytes // page_bytes
    ceiling = socket_seconds(total_bytes, num_rounds)
    pulled: dict[bool, float] = {}
    for checksums in (False, True):
        shape = Shape(num_blocks, page_bytes, checksums)
        with pulling(shape) as puller:
            pulled[checksums] = statistics.median(puller.seconds(0, meanwhile=False)[1] for _ in range(num_rounds))
            if checksums:
                chunk_seconds = 2 * pulled[True] / NUM_CHUNKS  # a prefill of twice a pull
                left = statistics.median(puller.seconds(chunk_seconds, meanwhile=True)[1] for _ in range(num_rounds))
    cost = 100 * (pulled[True] / pulled[False] - 1)
    hidden = 100 * (1 - left / pulled[True])
    return (
        f"| {page_bytes // 1024} | {num_blocks} | {gigabytes(total_bytes, ceiling)} | "
        f"{gigabytes(total_bytes, pulled[False])} | {gigabytes(total_bytes, pulled[True])} | {cost:+.0f} % | "
        f"{1000 * pulled[True]:.1f} | {1000 * left:.1f} | {hidden:.0f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="moved by each pull")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median is shown")
    options = parser.parse_args()
    print(
        "| page KiB | pages | socket GB/s | pull GB/s | checksummed GB/s | cost | pull ms | after prefill ms | hidden |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for page_bytes in (16 * 1024, 128 * 1024, 1024 * 1024):
        print(row(page_bytes, options.mib * MIB, options.rounds), flush=True)


if __name__ == "__main__":
    main()
