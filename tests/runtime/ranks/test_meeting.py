"""Where node 0 listens, and what it says of an address that is not its own."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvasir_operator.local.network import free_port
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.parallel.groups import open_meeting
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.ranks.links import RankLinks
from kvasir_runtime.ranks.meeting import told_addresses, told_links
from kvasir_runtime.ranks.messages import RankProgress


def test_an_address_of_another_node_is_refused_by_the_flags_name() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"--master-addr is 192\.0\.2\.1.*give an address of node 0"),
        told_links(MeetingPoint(host="192.0.2.1"), 1, None),
    ):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_node_learns_at_the_address_of_node_0_where_the_core_listens(host: str) -> None:
    point = MeetingPoint(host=host, port=free_port(host))
    with told_links(point, 1, None) as core:
        told = told_addresses(open_meeting(point, 1))
        assert told == core.bound
        assert point.own_address == host
        rank = RankLinks(told, 0, None)
        rank.send(RankProgress(0, 7, 0, {}))
        assert core.receive(20) == [RankProgress(0, 7, 0, {})]
        rank.close()


def test_engines_of_one_machine_meet_at_one_port_of_addresses_of_their_own() -> None:
    port = free_port("127.0.0.1")
    points = [MeetingPoint(host=host, port=port) for host in ("127.0.0.1", "127.0.0.2")]
    with told_links(points[0], 1, None) as one, told_links(points[1], 1, None) as other:
        for point, core in zip(points, (one, other), strict=True):
            assert told_addresses(open_meeting(point, 1)) == core.bound


def test_data_parallel_engines_meet_at_one_store_and_each_finds_its_own_core() -> None:
    port = free_port("127.0.0.1")
    points = [MeetingPoint(port=port, data_rank=data_rank) for data_rank in range(2)]
    with told_links(points[0], 1, None) as first, told_links(points[1], 2, None) as second:
        assert [told_addresses(open_meeting(point, 1)) for point in points] == [first.bound, second.bound]


def test_the_second_engine_may_come_before_the_first_which_hosts_the_store() -> None:
    first = MeetingPoint(port=free_port("127.0.0.1"))
    second = replace(first, data_rank=1)
    with ThreadPoolExecutor() as threads, ExitStack() as links:
        early = threads.submit(links.enter_context, told_links(second, 1, None))
        links.enter_context(told_links(first, 1, None))
        assert told_addresses(open_meeting(second, 1)) == early.result(30).bound


def test_a_port_in_use_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigurationError, match=r"--master-port \d+ of 127\.0\.0\.1 is in use"),
        told_links(MeetingPoint(port=taken.getsockname()[1]), 1, None),
    ):
        pass
