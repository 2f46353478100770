"""A connector between engines of one process and one rank each that copies pages of tensors registered by name: what
NIXL does, without it."""

from collections.abc import Sequence

from torch import Tensor

from kvasir_runtime.errors import KvTransferError
from kvasir_runtime.transfer.checksums import page_checksums
from kvasir_runtime.transfer.connector import Page, PagePair, ReadState, Side
from kvasir_runtime.transfer.messages import Region
from kvasir_runtime.transfer.page_layout import WHOLE_PAGES


class Memory:
    """What the engines of a process can see of one another."""

    def __init__(self) -> None:
        self.buffers: dict[bytes, Tensor] = {}


class InProcessConnector:
    def __init__(self, memory: Memory, name: str, buffer: Tensor) -> None:
        self._memory = memory
        self._name = name.encode()
        self._buffer = buffer
        self._peers: dict[str, bytes] = {}
        self._reads: dict[int, tuple[str, list[PagePair]]] = {}
        self._num_reads = 0
        memory.buffers[self._name] = buffer

    def regions(self) -> list[Region]:
        return [Region(self._name, 0, self._buffer.shape[1], 0)]

    def add_peer(self, engine_id: str, regions: Sequence[Region]) -> None:
        if regions[0].agent_metadata not in self._memory.buffers:
            raise KvTransferError(f"engine {engine_id} is not in this process")
        self._peers[engine_id] = regions[0].agent_metadata

    def remove_peer(self, engine_id: str) -> None:
        self._peers.pop(engine_id, None)

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        if engine_id not in self._peers:
            raise KvTransferError(f"engine {engine_id} is not known")
        self._num_reads += 1
        self._reads[self._num_reads] = engine_id, list(pairs)
        return self._num_reads

    def state(self, read: int) -> ReadState:
        engine_id, pairs = self._reads.pop(read)
        source = self._memory.buffers.get(self._peers.get(engine_id, b""))
        if source is None:
            return "failed"
        for pair in pairs:
            self._buffer[pair.ours] = source[pair.theirs]
        return "done"

    def cancel(self, read: int) -> None:
        self._reads[read] = "", []  # fails when it is asked for

    def progress(self) -> None: ...

    def checksums(self, pages: Sequence[Page], num_ranks: int, side: Side) -> list[int]:
        return page_checksums(self._buffer, WHOLE_PAGES, pages, num_ranks, side)

    def close(self) -> None:
        self._memory.buffers.pop(self._name, None)
