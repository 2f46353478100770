"""KV pages between engines through NIXL: one-sided reads by UCX, over RDMA, NVLink, shared memory or TCP.

A page is contiguous across all layers, so it is one descriptor; pages that follow each other on both sides are one
together. Only between engines that split the heads differently a page is many, and may come from several ranks. NIXL's
thread for progress never sleeps, also in an idle engine; instead whoever reads asks after its reads, and who is read
from calls `progress`.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.errors import ConfigurationError, KvTransferError
from kvasir_runtime.transfer.connector import Page, PagePair, ReadState, Side
from kvasir_runtime.transfer.messages import Region
from kvasir_runtime.transfer.page_layout import WHOLE_PAGES, PageParts, Part

if TYPE_CHECKING:
    from torch import Tensor  # not for a core whose ranks are elsewhere

logger = logging.getLogger(__name__)

BACKEND = "UCX"


@dataclass(frozen=True, slots=True)
class PeerRank:
    agent_name: str
    region: Region


@dataclass(frozen=True, slots=True)
class NixlPeer:
    num_ranks: int
    """Of the stage that keeps our layers."""
    ranks: dict[int, PeerRank]
    """Those that are read from."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Bytes to read from one rank: where they lie in the buffers, and how many; each int64 [n]."""

    ours: NDArray[np.int64]
    theirs: NDArray[np.int64]
    lengths: NDArray[np.int64]


class NixlConnector:
    """Of one rank."""

    def __init__(self, name: str, buffer: "Tensor", parts: PageParts | None = None) -> None:
        """Registers the buffer uint8 [num_blocks, page_bytes]. `parts` None: of an engine of one rank that exchanges
        with such alone. Raises ConfigurationError without NIXL."""
        api = _load()
        self._buffer = buffer
        self._parts = WHOLE_PAGES if parts is None else parts
        self._memory_kind = "VRAM" if buffer.device.type == "cuda" else "DRAM"
        self._device_id = buffer.get_device() if buffer.device.type == "cuda" else 0
        self._page_bytes = buffer.shape[1]
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        whole = [(buffer.data_ptr(), buffer.numel(), self._device_id, "")]
        self._registered = self._agent.register_memory(
            self._agent.get_reg_descs(whole, self._memory_kind), backends=[BACKEND]
        )
        self._peers: dict[str, NixlPeer] = {}
        self._reads: dict[int, list[Any]] = {}
        self._failed: set[int] = set()
        """Of the reads, those of which a part has."""
        self._num_reads = 0

    def regions(self) -> list[Region]:
        metadata: bytes = self._agent.get_agent_metadata()
        return [Region(metadata, self._buffer.data_ptr(), self._page_bytes, self._device_id)]

    def add_peer(self, engine_id: str, regions: Sequence[Region]) -> None:
        if engine_id in self._peers:
            return
        regions = self._parts.of_stage(regions)
        peer = self._peers[engine_id] = NixlPeer(len(regions), {})
        try:
            for rank in self._parts.sources(len(regions)):
                name = self._agent.add_remote_agent(regions[rank].agent_metadata)
                peer.ranks[rank] = PeerRank(name.decode() if isinstance(name, bytes) else name, regions[rank])
        except Exception as error:  # NIXL's own classes are not documented
            self.remove_peer(engine_id)
            raise KvTransferError(f"NIXL cannot reach engine {engine_id}: {error!r}") from error

    def remove_peer(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        for rank in () if peer is None else peer.ranks.values():
            try:
                self._agent.remove_remote_agent(rank.agent_name)
            except Exception as error:
                logger.warning("NIXL could not forget engine %s: %r", engine_id, error)

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        peer = self._peers.get(engine_id)
        if peer is None:
            raise KvTransferError(f"engine {engine_id} is not known")
        self._num_reads += 1
        handles = self._reads[self._num_reads] = []
        try:
            for rank, runs in self._runs(peer, pairs).items():
                handles.append(self._begin(peer.ranks[rank], runs))
        except Exception as error:
            if not handles:
                del self._reads[self._num_reads]
                raise KvTransferError(f"NIXL cannot read from engine {engine_id}: {error!r}") from error
            logger.warning("NIXL cannot read all parts of pages from engine %s: %r", engine_id, error)
            self._failed.add(self._num_reads)
        return self._num_reads

    def state(self, read: int) -> ReadState:
        handles = self._reads[read]
        for handle in handles[:]:
            state = self._state(handle)
            if state != "PROC":
                handles.remove(handle)
                self._release(handle)
            if state not in ("PROC", "DONE"):
                self._failed.add(read)
        if handles:
            return "reading"
        del self._reads[read]
        has_failed = read in self._failed
        self._failed.discard(read)
        return "failed" if has_failed else "done"

    def cancel(self, read: int) -> None:
        """NIXL cannot take a read back safely while its bytes are under way: it is waited for."""

    def progress(self) -> None:
        self._agent.get_new_notifs()  # there are none; asking makes UCX look at its connections

    def checksums(self, pages: Sequence[Page], num_ranks: int, side: Side) -> list[int]:
        from kvasir_runtime.transfer.checksums import page_checksums  # torch: not for a core whose ranks are elsewhere

        return page_checksums(self._buffer, self._parts, pages, num_ranks, side)

    def close(self) -> None:
        for engine_id in list(self._peers):
            self.remove_peer(engine_id)
        self._agent.deregister_memory(self._registered, backends=[BACKEND])

    def _runs(self, peer: NixlPeer, pairs: Sequence[PagePair]) -> dict[int, Runs]:
        """What to read from each rank."""
        runs: dict[int, list[Runs]] = {}
        for group, of_group in groupby(sorted(pairs, key=_group_of), key=_group_of):
            whole = page_runs(list(of_group))
            for part in self._parts.to_read(group, peer.num_ranks):
                their_page_bytes = peer.ranks[part.rank].region.page_bytes
                runs.setdefault(part.rank, []).append(part_runs(part, whole, self._page_bytes, their_page_bytes))
        return {
            rank: Runs(
                *(np.concatenate([getattr(one, name) for one in of_rank]) for name in ("ours", "theirs", "lengths"))
            )
            for rank, of_rank in runs.items()
        }

    def _begin(self, rank: PeerRank, runs: Runs) -> Any:
        ours = self._descriptors(self._buffer.data_ptr() + runs.ours, self._device_id, runs.lengths)
        theirs = self._descriptors(rank.region.base_address + runs.theirs, rank.region.device_id, runs.lengths)
        handle = self._agent.initialize_xfer("READ", ours, theirs, rank.agent_name)
        self._agent.transfer(handle)
        return handle

    def _descriptors(self, addresses: NDArray[np.int64], device_id: int, lengths: NDArray[np.int64]) -> Any:
        table = np.empty((len(lengths), 3), dtype=np.uint64)
        table[:, 0] = addresses
        table[:, 1] = lengths
        table[:, 2] = device_id
        return self._agent.get_xfer_descs(table, self._memory_kind)

    def _state(self, handle: Any) -> str:
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception as error:  # the connection broke
            logger.warning("a NIXL read broke off: %r", error)
            return "ERR"

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


def part_runs(part: Part, pages: NDArray[np.int64], our_page_bytes: int, their_page_bytes: int) -> Runs:
    """The bytes of a part of the pages in runs [n, 3]."""
    if part.segments is None:
        return Runs(pages[:, 0] * our_page_bytes, pages[:, 1] * their_page_bytes, pages[:, 2] * our_page_bytes)
    steps = np.concatenate([np.arange(length) for length in pages[:, 2]])
    ours, theirs = (np.repeat(pages[:, side], pages[:, 2]) + steps for side in (0, 1))
    table = np.array([(one.ours, one.theirs, one.num_bytes) for one in part.segments], dtype=np.int64)
    return Runs(
        (ours[:, None] * our_page_bytes + table[:, 0]).ravel(),
        (theirs[:, None] * their_page_bytes + table[:, 1]).ravel(),
        np.tile(table[:, 2], len(ours)),
    )


def _group_of(pair: PagePair) -> int:
    return pair.group


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
