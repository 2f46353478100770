"""KV pages between engines through NIXL: one-sided reads by UCX, over RDMA, NVLink, shared memory or TCP.

A page is contiguous across all layers, so it is one descriptor; pages that follow each other on both sides are one
together. NIXL's thread for progress never sleeps, also in an idle engine; instead whoever reads asks after its
reads, and who is read from calls `progress`.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.errors import ConfigurationError, KvTransferError
from kvasir_runtime.transfer.checksums import page_checksums
from kvasir_runtime.transfer.connector import PagePair, ReadState
from kvasir_runtime.transfer.messages import Region

logger = logging.getLogger(__name__)

BACKEND = "UCX"


@dataclass(frozen=True, slots=True)
class NixlPeer:
    agent_name: str
    region: Region


class NixlConnector:
    def __init__(self, name: str, buffer: Tensor) -> None:
        """Registers the buffer uint8 [num_blocks, page_bytes]. Raises ConfigurationError without NIXL."""
        api = _load()
        self._buffer = buffer
        self._memory_kind = "VRAM" if buffer.device.type == "cuda" else "DRAM"
        self._device_id = buffer.get_device() if buffer.device.type == "cuda" else 0
        self._page_bytes = buffer.shape[1]
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        whole = [(buffer.data_ptr(), buffer.numel(), self._device_id, "")]
        self._registered = self._agent.register_memory(
            self._agent.get_reg_descs(whole, self._memory_kind), backends=[BACKEND]
        )
        self._peers: dict[str, NixlPeer] = {}
        self._reads: dict[int, Any] = {}
        self._num_reads = 0

    def region(self) -> Region:
        metadata: bytes = self._agent.get_agent_metadata()
        return Region(metadata, self._buffer.data_ptr(), self._page_bytes, self._device_id)

    def add_peer(self, engine_id: str, regions: Sequence[Region]) -> None:
        if len(regions) != 1:
            raise KvTransferError(
                f"engine {engine_id} has its KV on {len(regions)} ranks, and this one on 1: prefill and decode need "
                "the same tensor-parallel size"
            )
        if engine_id in self._peers:
            return
        try:
            name = self._agent.add_remote_agent(regions[0].agent_metadata)
        except Exception as error:  # NIXL's own classes are not documented
            raise KvTransferError(f"NIXL cannot reach engine {engine_id}: {error!r}") from error
        self._peers[engine_id] = NixlPeer(name.decode() if isinstance(name, bytes) else name, regions[0])

    def remove_peer(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer.agent_name)
            except Exception as error:
                logger.warning("NIXL could not forget engine %s: %r", engine_id, error)

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        peer = self._peers.get(engine_id)
        if peer is None:
            raise KvTransferError(f"engine {engine_id} is not known")
        runs = page_runs(pairs)
        try:
            ours = self._descriptors(self._buffer.data_ptr(), self._device_id, runs[:, 0], runs[:, 2])
            theirs = self._descriptors(peer.region.base_address, peer.region.device_id, runs[:, 1], runs[:, 2])
            handle = self._agent.initialize_xfer("READ", ours, theirs, peer.agent_name)
            self._agent.transfer(handle)
        except Exception as error:
            raise KvTransferError(f"NIXL cannot read from engine {engine_id}: {error!r}") from error
        self._num_reads += 1
        self._reads[self._num_reads] = handle
        return self._num_reads

    def state(self, read: int) -> ReadState:
        handle = self._reads[read]
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:  # the connection broke
            logger.warning("a NIXL read broke off: %r", error)
            state = "ERR"
        if state == "PROC":
            return "reading"
        del self._reads[read]
        self._release(handle)
        return "done" if state == "DONE" else "failed"

    def cancel(self, read: int) -> None:
        """NIXL cannot take a read back safely while its bytes are under way: it is waited for."""

    def progress(self) -> None:
        self._agent.get_new_notifs()  # there are none; asking makes UCX look at its connections

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return page_checksums(self._buffer, block_ids)

    def close(self) -> None:
        for engine_id in list(self._peers):
            self.remove_peer(engine_id)
        self._agent.deregister_memory(self._registered, backends=[BACKEND])

    def _descriptors(self, base: int, device_id: int, firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
        table = np.empty((len(firsts), 3), dtype=np.uint64)
        table[:, 0] = base + firsts * self._page_bytes
        table[:, 1] = lengths * self._page_bytes
        table[:, 2] = device_id
        return self._agent.get_xfer_descs(table, self._memory_kind)

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            logger.warning("NIXL could not release a read: %r", error)


def page_runs(pairs: Sequence[PagePair]) -> NDArray[np.int64]:
    """Pairs in order of our pages, as runs [n, 3] of (first of ours, first of theirs, number of pages)."""
    ids = np.array(sorted((pair.ours, pair.theirs) for pair in pairs), dtype=np.int64)
    breaks = np.flatnonzero((np.diff(ids, axis=0) != 1).any(axis=1)) + 1
    firsts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((firsts, [len(ids)])))
    return np.column_stack((ids[firsts], lengths))


def check_installed() -> None:
    """Raises ConfigurationError, before anything is loaded."""
    _load()


def _load() -> Any:
    """NIXL, which takes a while to import and is needed only where KV is exchanged."""
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigurationError(
            f"--kv-transfer-config: NIXL cannot be imported ({error}); install the packages nixl and nixl-cu13 (pip "
            "install --no-deps nixl nixl-cu13), or leave the flag out"
        ) from error
