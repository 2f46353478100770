"""Who is let in where connections are scarce, and who makes way."""

import resource

import pytest

from kvasir_http.connections import SPARE_DESCRIPTORS, ConnectionLimits, Connections, most_descriptors, peer_of


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


def test_who_has_not_read_for_the_longest_is_cut_off_once_all_have_too_much_unread() -> None:
    connections = Connections(ConnectionLimits(total=9, per_peer=9), most_unread_bytes=250)
    first, second, third, fourth = opened(connections, "a", "b", "c", "d")
    for slow in (first, second):
        connections.held_back(slow, 100)
    connections.taken(first)
    for slow in (third, fourth):
        connections.held_back(slow, 100)
    assert fates(first, second, third, fourth) == ["served", "closed", "served", "served"]
    connections.closed(third)
    connections.held_back(first, 150)
    assert fates(first, fourth) == ["served", "served"]


def test_one_more_makes_the_longest_idle_close() -> None:
    connections = Connections(ConnectionLimits(total=2, per_peer=9))
    assert fates(*opened(connections, "a", "b", "c")) == ["closed", "served", "served"]
    assert len(connections) == 2


def test_a_connection_with_a_request_does_not_make_way() -> None:
    connections = Connections(ConnectionLimits(total=2, per_peer=9))
    first, second = opened(connections, "a", "b")
    connections.busy(first)
    (third,) = opened(connections, "c")
    assert fates(first, second, third) == ["served", "closed", "served"]


def test_the_longest_idle_is_the_one_whose_answer_ended_first() -> None:
    connections = Connections(ConnectionLimits(total=2, per_peer=9))
    first, second = opened(connections, "a", "b")
    connections.busy(first)
    connections.idle(first)
    (third,) = opened(connections, "c")
    assert fates(first, second, third) == ["served", "closed", "served"]


def test_where_all_are_busy_a_newcomer_is_refused() -> None:
    connections = Connections(ConnectionLimits(total=1, per_peer=9))
    (first,) = opened(connections, "a")
    connections.busy(first)
    assert fates(first, *opened(connections, "b")) == ["served", "refused"]


def test_a_peer_with_too_many_makes_way_for_itself_only() -> None:
    connections = Connections(ConnectionLimits(total=9, per_peer=2))
    other, *own = opened(connections, "b", "a", "a", "a")
    assert fates(other, *own) == ["served", "closed", "served", "served"]


def test_a_peer_whose_connections_are_all_busy_is_refused_one_more() -> None:
    connections = Connections(ConnectionLimits(total=9, per_peer=1))
    other, own = opened(connections, "b", "a")
    connections.busy(own)
    assert fates(other, own, *opened(connections, "a")) == ["served", "served", "refused"]


def test_a_closed_connection_makes_room() -> None:
    connections = Connections(ConnectionLimits(total=2, per_peer=1))
    for _ in range(3):
        (client,) = opened(connections, "a")
        connections.busy(client)
        connections.closed(client)
        connections.closed(client)
        assert client.fate == "served"
    assert len(connections) == 0


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
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_peer_is_an_ipv4_address_or_an_ipv6_hosts_network(host: str, peer: str) -> None:
    assert peer_of(host) == peer


@pytest.mark.parametrize(
    ("descriptors", "per_connection", "expected"),
    [
        (resource.RLIM_INFINITY, 1, ConnectionLimits(4096, 2048)),
        (4096 + SPARE_DESCRIPTORS, 1, ConnectionLimits(4096, 2048)),
        (4095 + SPARE_DESCRIPTORS, 1, ConnectionLimits(4095, 2047)),
        (2000 + SPARE_DESCRIPTORS, 1, ConnectionLimits(2000, 1000)),
        (2000 + SPARE_DESCRIPTORS, 2, ConnectionLimits(1000, 500)),
        (SPARE_DESCRIPTORS, 1, ConnectionLimits(1, 1)),
    ],
)
def test_fewer_descriptors_leave_one_peer_no_more_than_half(
    descriptors: int, per_connection: int, expected: ConnectionLimits
) -> None:
    assert ConnectionLimits(4096, 2048).within(descriptors, per_connection) == expected


def test_a_limit_a_peer_that_was_asked_for_is_kept_where_all_are_taken() -> None:
    assert ConnectionLimits(100, 100).within(1 << 20) == ConnectionLimits(100, 100)


@pytest.mark.parametrize("hard", [1128, resource.RLIM_INFINITY])
def test_a_process_takes_as_many_descriptors_as_it_may(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert most_descriptors() == hard
    assert raised == [(hard, hard)]
