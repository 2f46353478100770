"""What is asked of an engine of two ranks is asked of both, and what one of them fails at has failed."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.runtime.transfer.in_process import InProcessConnector, Memory

from kvasir_runtime.errors import KvTransferError
from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.transfer.connector import CHECKSUM_MODULUS, Page, PagePair
from kvasir_runtime.transfer.messages import Region
from kvasir_runtime.transfer.rank_connectors import RankConnectors
from kvasir_runtime.transfer.rank_transfers import RankTransfers


class Ranks:
    """Two ranks of ours, and one of a peer that both read from."""

    def __init__(self, folder: Path) -> None:
        self.memory = Memory()
        self.links = CoreLinks(ipc_addresses(folder, 2))
        self.source = torch.randint(0, 256, (4, 8), dtype=torch.uint8)
        self.peer = InProcessConnector(self.memory, "peer", self.source)
        self.buffers = [torch.zeros((4, 8), dtype=torch.uint8) for _ in range(2)]
        self.own = [InProcessConnector(self.memory, f"rank-{rank}", buffer) for rank, buffer in enumerate(self.buffers)]
        self.failures: list[Exception] = []
        for connector, address in zip(self.own, self.links.bound.transfers, strict=True):
            RankTransfers(connector, address, self.failures.append).start()
        self.connectors = RankConnectors(self.links.transfers)

    def read(self, pairs: list[PagePair]) -> str:
        number = self.connectors.start_read("peer", pairs)
        deadline = time.monotonic() + 20
        while (state := self.connectors.state(number)) == "reading":
            assert time.monotonic() < deadline, "the read never ended"
            time.sleep(0.001)
        return state


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.links.close()
    assert made.failures == []


def test_every_rank_reads_into_its_own_buffer(ranks: Ranks) -> None:
    ranks.connectors.add_peer("peer", ranks.peer.regions())
    assert ranks.read([PagePair(1, 2), PagePair(3, 0)]) == "done"
    for buffer in ranks.buffers:
        assert torch.equal(buffer[[1, 3]], ranks.source[[2, 0]])
        assert not buffer[[0, 2]].any()


def test_regions_and_checksums_are_those_of_all_ranks(ranks: Ranks) -> None:
    assert [region.agent_metadata for region in ranks.connectors.regions()] == [b"rank-0", b"rank-1"]
    ranks.buffers[1].random_(0, 256)
    pages = [Page(3), Page(0)]
    of_each = [connector.checksums(pages, 1, "written") for connector in ranks.own]
    expected = [sum(sums) % CHECKSUM_MODULUS for sums in zip(*of_each, strict=True)]
    assert ranks.connectors.checksums(pages, 1, "written") == expected


def test_a_read_that_one_rank_cannot_begin_has_failed(ranks: Ranks) -> None:
    ranks.connectors.add_peer("peer", ranks.peer.regions())
    ranks.own[1].remove_peer("peer")
    assert ranks.read([PagePair(1, 2)]) == "failed"


def test_a_read_that_one_rank_fails_at_has_failed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.connectors.add_peer("peer", ranks.peer.regions())
    monkeypatch.setattr(ranks.own[0], "state", lambda _: "failed")
    assert ranks.read([PagePair(1, 2)]) == "failed"


def test_a_peer_that_a_rank_cannot_reach_is_refused_with_its_reason(ranks: Ranks) -> None:
    with pytest.raises(KvTransferError, match="engine stranger is not in this process"):
        ranks.connectors.add_peer("stranger", [Region(b"stranger", 0, 8, 0)])


def test_a_rank_that_does_not_answer_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.connectors.answer_seconds, may_answer = 0.0, threading.Event()
    monkeypatch.setattr(ranks.own[1], "checksums", lambda *_: [int(may_answer.wait(20))])
    with pytest.raises(KvTransferError, match=r"the transfer threads of ranks \[(0, )?1\] have not answered"):
        ranks.connectors.checksums([Page(0)], 1, "written")
    may_answer.set()


def test_checksums_that_a_rank_cannot_compute_end_the_transfer_and_not_the_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[int]:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(ranks.own[1], "checksums", fail)
        with pytest.raises(KvTransferError, match="a rank could not compute the checksums"):
            ranks.connectors.checksums([Page(0)], 1, "written")
    assert len(ranks.connectors.checksums([Page(0)], 1, "written")) == 1
