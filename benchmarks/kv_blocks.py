"""What it costs to move KV blocks from one engine's process to another's on this machine (a part of disaggregation.py).

Pulls go through the real transfer agents, the side channel and NIXL, with and without checksums. Beside them stand
three ceilings: bytes through a plain TCP socket over loopback, another process's memory read through the kernel, as UCX
does where it may, and one copy from memory to memory by one core, or within a GPU. Hidden is what of a pull takes place
while a prefill writes the blocks in chunks; the prefill is a wait of twice a pull, so that the protocol's share is
shown and not that of two processes on the same cores.
"""

import ctypes
import itertools
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import (
    BeginOffer,
    BeginPull,
    OfferBlocks,
    OfferedBlock,
    Place,
    PullEnded,
    ReadInto,
)
from kvasir_runtime.transfer.messages import Identity
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.side_channel import SideChannel

Start = Callable[..., Any]
"""Makes what runs a function beside this one: a process, or a thread to see that all of it works."""
SPAWN = multiprocessing.get_context("spawn").Process

IDENTITY = Identity(
    model="m", revision="", dtype="uint8", block_size=16, kv_layout="pages", pipeline_cut=[1], hash_rule="numbers"
)
HOST = "127.0.0.1"
NUM_CHUNKS = 8
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    num_blocks: int
    page_bytes: int
    checksums: bool
    device: str
    """Where both sides keep their blocks."""

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
    buffer = torch.randint(0, 256, (shape.num_blocks, shape.page_bytes), dtype=torch.uint8, device=shape.device)
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
                last = first + step
                agent.post(OfferBlocks(order.key, order.key, blocks[first:last], last >= len(blocks)))
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
        self._agent.post(wish, ReadInto(key, {number: (number,) for number in range(len(hashes))}))

    def _await_end(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            for event in self._agent.take():
                assert isinstance(event, PullEnded)
                assert event.failure is None, event.failure.message
                return


@contextmanager
def pulling(shape: Shape, start: Start) -> Iterator[Puller]:
    ours, theirs = multiprocessing.Pipe()
    process = start(target=keep, args=(shape, theirs), daemon=True)
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


def socket_seconds(num_bytes: int, num_rounds: int, start: Start) -> float:
    """The median of rounds: one byte to ask, then all bytes into memory that is there already."""
    with socket.create_server((HOST, 0)) as listener:
        process = start(target=send_all, args=(num_bytes, num_rounds, listener.getsockname()[1]), daemon=True)
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


class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def keep_memory(num_bytes: int, orders: Connection) -> None:
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    orders.send((os.getpid(), memory.data_ptr()))
    orders.recv()


def kernel_seconds(num_bytes: int, num_rounds: int, start: Start) -> float:
    """The median of rounds: process_vm_readv of all bytes at once into memory that is there already. Raises OSError."""
    read, target = ctypes.CDLL(None, use_errno=True).process_vm_readv, torch.ones(num_bytes, dtype=torch.uint8)
    vectors = (ctypes.POINTER(IoVec), ctypes.c_ulong)
    read.argtypes, read.restype = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong), ctypes.c_ssize_t
    ours, theirs = multiprocessing.Pipe()
    # A daemon: where reading is forbidden, nobody tells it to end.
    process = start(target=keep_memory, args=(num_bytes, theirs), daemon=True)
    process.start()
    pid, address = ours.recv()
    into, source = IoVec(target.data_ptr(), num_bytes), IoVec(address, num_bytes)
    rounds = []
    for _ in range(num_rounds):
        began = time.monotonic()
        if read(pid, ctypes.byref(into), 1, ctypes.byref(source), 1, 0) != num_bytes:
            raise OSError(ctypes.get_errno(), f"process_vm_readv: {os.strerror(ctypes.get_errno())}")
        rounds.append(time.monotonic() - began)
    ours.send(None)
    process.join()
    return statistics.median(rounds[1:])


def gigabytes(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f}"


def copy_seconds(num_bytes: int, num_rounds: int, device: str) -> float:
    """The median of rounds, within this process and on one device."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rounds = []
    for _ in range(num_rounds):
        began = time.monotonic()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        rounds.append(time.monotonic() - began)
    return statistics.median(rounds[1:])


@dataclass(frozen=True)
class PullTimes:
    """Seconds, medians of rounds."""

    plain: float
    checksummed: float
    exposed: float
    """From the end of the prefill to the last block, with checksums, where blocks were pulled chunk by chunk."""

    @property
    def checksum_cost(self) -> float:
        return self.checksummed / self.plain - 1

    @property
    def hidden(self) -> float:
        """The share of a pull that took place beside the prefill."""
        return 1 - self.exposed / self.checksummed


def time_pulls(num_blocks: int, page_bytes: int, num_rounds: int, device: str, start: Start) -> PullTimes:
    def median(puller: Puller, chunk_seconds: float, *, meanwhile: bool) -> float:
        return statistics.median(puller.seconds(chunk_seconds, meanwhile=meanwhile)[1] for _ in range(num_rounds))

    with pulling(Shape(num_blocks, page_bytes, checksums=False, device=device), start) as puller:
        plain = median(puller, 0, meanwhile=False)
    with pulling(Shape(num_blocks, page_bytes, checksums=True, device=device), start) as puller:
        checksummed = median(puller, 0, meanwhile=False)
        return PullTimes(plain, checksummed, median(puller, 2 * checksummed / NUM_CHUNKS, meanwhile=True))


def kv_blocks(mib: int, num_rounds: int, device: str, page_sizes_kib: Sequence[int], start: Start = SPAWN) -> str:
    """A table, a row for each page size; every pull moves `mib` between blocks on devices of that kind."""
    num_bytes = mib * MIB
    torch.set_num_threads(1)  # an engine has a core, and so has the copy that is compared
    through_socket = gigabytes(num_bytes, socket_seconds(num_bytes, num_rounds, start))
    through_kernel = gigabytes(num_bytes, kernel_seconds(num_bytes, num_rounds, start))
    copied = gigabytes(num_bytes, copy_seconds(num_bytes, num_rounds, device))
    lines = [
        f"## Pulls of {mib} MiB between two processes, blocks on {device} (medians of {num_rounds})",
        "",
        f"Ceilings: a TCP socket over loopback {through_socket} GB/s, process_vm_readv {through_kernel} GB/s, a copy "
        f"within a process {copied} GB/s.",
        "",
        "| page, KiB | pages | pull, GB/s | with checksums, GB/s | cost of checksums | pull with checksums, ms | "
        "of it after the prefill, ms | hidden |",
        "|---" * 8 + "|",
    ]
    for page_kib in page_sizes_kib:
        num_blocks = num_bytes // (page_kib * 1024)
        times = time_pulls(num_blocks, page_kib * 1024, num_rounds, device, start)
        lines.append(
            f"| {page_kib} | {num_blocks} | {gigabytes(num_bytes, times.plain)} | "
            f"{gigabytes(num_bytes, times.checksummed)} | {times.checksum_cost:+.0%} | "
            f"{1000 * times.checksummed:.1f} | {1000 * times.exposed:.1f} | {times.hidden:.0%} |"
        )
    return "\n".join(lines)
