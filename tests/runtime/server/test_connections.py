"""Who is let in where connections are scarce, and who makes way."""

import pytest

from kvasir_runtime.server.connections import ConnectionLimits, Connections, peer_of


class Client:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.fate = "served"

    def abort(self) -> None:
        self.fate = "closed"

    def refuse_for_lack_of_room(self) -> None:
        self.fate = "refused"


def opened(connections: Connections, *peers: str) -> list[Client]:
    clients = [Client(peer) for peer in peers]
    for client in clients:
        connections.opened(client)
    return clients


def fates(*clients: Client) -> list[str]:
    return [client.fate for client in clients]


def test_as_many_as_allowed_are_served() -> None:
    connections = Connections(ConnectionLimits(total=3, per_peer=2))
    assert fates(*opened(connections, "a", "a", "b")) == ["served"] * 3


def test_one_more_makes_the_longest_idle_close() -> None:
    connections = Connections(ConnectionLimits(total=2, per_peer=9))
    first, second = opened(connections, "a", "b")
    connections.busy(first)
    connections.idle(first)
    assert fates(first, second, *opened(connections, "c")) == ["served", "closed", "served"]


def test_a_peer_with_too_many_makes_way_for_itself_only() -> None:
    connections = Connections(ConnectionLimits(total=9, per_peer=2))
    assert fates(*opened(connections, "b", "a", "a", "a")) == ["served", "closed", "served", "served"]


def test_a_peer_whose_connections_are_all_busy_is_refused_one_more() -> None:
    connections = Connections(ConnectionLimits(total=9, per_peer=1))
    other, own = opened(connections, "b", "a")
    connections.busy(own)
    assert fates(other, own, *opened(connections, "a")) == ["served", "served", "refused"]


def test_a_closed_connection_makes_room_once() -> None:
    connections = Connections(ConnectionLimits(total=2, per_peer=2))
    first, second = opened(connections, "a", "a")
    for each in (first, second):
        connections.busy(each)
    connections.closed(first)
    connections.closed(first)
    assert fates(*opened(connections, "a", "a")) == ["closed", "served"]


def test_one_that_has_made_way_is_not_idle_when_its_answer_ends() -> None:
    connections = Connections(ConnectionLimits(total=1, per_peer=9))
    first, second = opened(connections, "a", "b")
    connections.idle(first)
    assert fates(first, second, *opened(connections, "c")) == ["closed", "closed", "served"]


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_peer_is_an_ipv4_address_or_an_ipv6_hosts_network(host: str, peer: str) -> None:
    assert peer_of(host) == peer
