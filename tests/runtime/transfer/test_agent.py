"""The agent's thread over real sockets: what is offered on one side is pulled by the other, by copies and by NIXL."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
import zmq
from tests.runtime.transfer.in_process import InProcessConnector, Memory
from tests.runtime.transfer.simulation import IDENTITY

from kvasir_operator.local.network import free_port
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.service_secret import SECRET_VARIABLE, CurveKeys, curve_keys
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import (
    BeginOffer,
    BeginPull,
    FromAgent,
    OfferBlocks,
    OfferedBlock,
    OfferEnded,
    Place,
    PullEnded,
    ReadInto,
)
from kvasir_runtime.transfer.connector import PagePair
from kvasir_runtime.transfer.nixl import NixlConnector, check_installed, page_runs
from kvasir_runtime.transfer.side_channel import SideChannel

KEYS, OTHER_KEYS = (curve_keys({SECRET_VARIABLE: secret}) for secret in ("ours", "another"))
NUM_BLOCKS, PAGE_BYTES = 16, 4096
HASHES = [bytes([number]) * 16 for number in range(4)]


@dataclass
class Side:
    agent: TransferAgent
    channel: SideChannel
    buffer: torch.Tensor
    connector: InProcessConnector | NixlConnector
    is_woken: threading.Event

    def next_events(self) -> list[FromAgent]:
        assert self.is_woken.wait(20), "the agent never told of anything"
        self.is_woken.clear()
        return self.agent.take()


@pytest.fixture(params=["in process", "nixl"])
def make_side(request: pytest.FixtureRequest) -> Iterator[Callable[..., Side]]:
    memory = Memory()
    with ExitStack() as stack:

        def make(
            name: str,
            *,
            checksums: bool = True,
            lease_seconds: float = 30.0,
            keys: CurveKeys | None = None,
            host: str = "127.0.0.1",
        ) -> Side:
            buffer = torch.randint(0, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
            if request.param == "nixl":
                connector: InProcessConnector | NixlConnector = NixlConnector(f"{name}-{time.monotonic_ns()}", buffer)
            else:
                connector = InProcessConnector(memory, name, buffer)
            channel, woken = SideChannel(host, 0, keys), threading.Event()
            stack.callback(channel.close)
            agent = TransferAgent(
                connector, channel, IDENTITY, Place(engine_id=name, host=host, port=channel.port),
                page_bytes=PAGE_BYTES, lease_seconds=lease_seconds, timeout_seconds=20, checksums=checksums,
                wake_core=woken.set,
            )  # fmt: skip
            agent.start()
            stack.callback(agent.close)
            return Side(agent, channel, buffer, connector, woken)

        yield make


def pull(prefill: Side, decode: Side, key: str = "k", host: str = "127.0.0.1") -> PullEnded:
    """Blocks 3, 4, 5, 9 of one side to 2, 3, 4, 7 of the other, told in two pieces."""
    theirs, ours = (3, 4, 5, 9), (2, 3, 4, 7)
    blocks = [OfferedBlock(block_hash, (block,)) for block_hash, block in zip(HASHES, theirs, strict=True)]
    decode.agent.post(
        BeginPull(request_id="d", host=host, port=prefill.channel.port, key=key, hashes=HASHES, first=0),
        ReadInto("d", {index: (block,) for index, block in enumerate(ours)}),
    )
    prefill.agent.post(
        BeginOffer(key, "p"), OfferBlocks(key, "p", blocks[:1], False), OfferBlocks(key, "p", blocks[1:], True)
    )
    (ended,) = decode.next_events()
    assert isinstance(ended, PullEnded)
    return ended


@pytest.mark.parametrize("checksums", [True, False])
def test_pages_arrive_as_they_were(make_side: Callable[..., Side], checksums: bool) -> None:
    prefill, decode = make_side("p", checksums=checksums), make_side("d", checksums=checksums)
    before = decode.buffer.clone()
    ended = pull(prefill, decode)
    assert ended == PullEnded("d", 4, None)
    before[[2, 3, 4, 7]] = prefill.buffer[[3, 4, 5, 9]]
    assert torch.equal(decode.buffer, before)
    assert prefill.next_events() == [OfferEnded("p", "pulled")]
    stats = decode.agent.stats(0)
    assert (stats.num_blocks_received, stats.page_bytes, sum(stats.seconds_counts)) == (4, PAGE_BYTES, 1)


def test_pages_arrive_over_ipv6(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side("p", host="::1"), make_side("d", host="::1")
    assert pull(prefill, decode, host="::1") == PullEnded("d", 4, None)
    assert torch.equal(decode.buffer[7], prefill.buffer[9])


def test_a_second_pull_needs_no_second_handshake(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side("p"), make_side("d")
    assert pull(prefill, decode, "first").failure is None
    prefill.buffer.random_(0, 256)
    assert pull(prefill, decode, "second").failure is None
    assert torch.equal(decode.buffer[7], prefill.buffer[9])


def test_an_engine_that_is_not_there_is_noticed_at_once(make_side: Callable[..., Side]) -> None:
    decode = make_side("d")
    port = free_port("127.0.0.1")
    decode.agent.post(BeginPull(request_id="d", host="127.0.0.1", port=port, key="k", hashes=HASHES, first=0))
    began = time.monotonic()
    (ended,) = decode.next_events()
    assert ended.failure.reason == "unreachable"
    assert time.monotonic() - began < 3


def test_a_host_that_is_none_harms_its_own_request_only(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side("p"), make_side("d")
    prefill.agent.post(BeginOffer("k", "p"), OfferBlocks("k", "p", [OfferedBlock(HASHES[0], (3,))], True))
    decode.agent.post(
        BeginPull(request_id="bad", host="no host", port=5600, key="k", hashes=HASHES, first=0),
        BeginPull(request_id="d", host="127.0.0.1", port=prefill.channel.port, key="k", hashes=HASHES[:1], first=0),
        ReadInto("d", {0: (2,)}),
    )
    ended = {event.request_id: event for event in decode.next_events()}
    while len(ended) < 2:
        ended |= {event.request_id: event for event in decode.next_events()}
    assert ended["bad"].failure.reason == "unreachable"
    assert ended["d"] == PullEnded("d", 1, None)


def test_an_engine_that_dies_is_noticed_at_once(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side("p"), make_side("d")
    prefill.agent.post(BeginOffer("k", "p"))
    wish = BeginPull(request_id="d", host="127.0.0.1", port=prefill.channel.port, key="k", hashes=HASHES, first=0)
    decode.agent.post(wish, ReadInto("d", {index: (index,) for index in range(4)}))
    prefill.agent.post(OfferBlocks("k", "p", [OfferedBlock(HASHES[0], (3,))], False))
    while not decode.agent.stats(0).num_blocks_received:
        time.sleep(0.01)
    prefill.agent.close()
    prefill.channel.close()
    began = time.monotonic()
    (ended,) = decode.next_events()
    assert (ended.failure.reason, ended.num_blocks) == ("unreachable", 1)
    assert time.monotonic() - began < 3


def test_a_lease_expires_by_the_real_clock(make_side: Callable[..., Side]) -> None:
    prefill = make_side("p", lease_seconds=0.3)
    prefill.agent.post(BeginOffer("k", "p"), OfferBlocks("k", "p", [OfferedBlock(HASHES[0], (3,))], True))
    assert prefill.next_events() == [OfferEnded("p", "expired")]


def test_what_is_no_message_is_dropped(make_side: Callable[..., Side], caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make_side("p"), make_side("d")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{prefill.channel.port}")
        stranger.send(b"\x93garbage")
        assert pull(prefill, decode).failure is None
    assert "is not understood" in caplog.text


def test_engines_with_one_secret_exchange_as_without(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side("p", keys=KEYS), make_side("d", keys=KEYS)
    assert pull(prefill, decode).failure is None
    assert torch.equal(decode.buffer[7], prefill.buffer[9])


@pytest.mark.parametrize(("theirs", "ours"), [(KEYS, None), (KEYS, OTHER_KEYS), (None, KEYS)])
def test_an_engine_without_the_others_secret_gets_nothing_and_hears_why(
    make_side: Callable[..., Side], theirs: CurveKeys | None, ours: CurveKeys | None
) -> None:
    ended = pull(make_side("p", keys=theirs), make_side("d", keys=ours))
    assert (ended.num_blocks, ended.failure.reason) == (0, "unreachable")
    assert "it is refused, as where KVASIR_ROUTER_SECRET differs" in ended.failure.message


class CountingConnector(InProcessConnector):
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_a_stop_leaves_a_thread_behind_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    threads = set(threading.enumerate())
    is_hanging, may_go_on = threading.Event(), threading.Event()

    def hang() -> float:
        is_hanging.set()
        may_go_on.wait()
        return time.monotonic()

    connector = CountingConnector(Memory(), "h", torch.zeros((1, 8), dtype=torch.uint8))
    channel = SideChannel("127.0.0.1", 0)
    agent = TransferAgent(
        connector, channel, IDENTITY, Place(engine_id="h", host="127.0.0.1", port=channel.port), page_bytes=8,
        lease_seconds=20, timeout_seconds=20, checksums=True, wake_core=lambda: None, clock=hang,
    )  # fmt: skip
    agent.start()
    agent.post(BeginOffer("k", "p"))
    assert is_hanging.wait(20)
    [thread] = set(threading.enumerate()) - threads
    agent.close(wait_seconds=0.1)
    assert "the KV transfer thread has not ended in 0.1 s" in caplog.text
    assert connector.num_closed == 0, "the thread still has it"
    may_go_on.set()
    thread.join(20)
    assert not thread.is_alive()
    channel.close()


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    first = SideChannel("127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{first.port}.*side_channel_port"):
        SideChannel("127.0.0.1", first.port)
    first.close()


def test_without_nixl_the_flag_is_refused_by_the_packages_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigurationError, match=r"--kv-transfer-config: NIXL cannot be imported.*nixl-cu13"):
        check_installed()


def test_neighbouring_pages_are_one_run() -> None:
    pairs = [PagePair(7, 9), PagePair(2, 3), PagePair(3, 4), PagePair(4, 6), PagePair(8, 10)]
    assert page_runs(pairs).tolist() == [[2, 3, 2], [4, 6, 1], [7, 9, 2]]
