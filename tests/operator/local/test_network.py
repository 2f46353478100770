"""Addresses that no two runs share."""

import socket
from pathlib import Path

import pytest

from kvasir_operator.errors import AddressInUseError
from kvasir_operator.local.network import LoopbackNetwork, free_port, require_free, reserve_network, usable_port


def test_two_runs_have_different_networks(network: LoopbackNetwork) -> None:
    with reserve_network() as other:
        assert other.next_address() != network.next_address()


def test_a_network_is_given_back() -> None:
    with reserve_network() as first:
        address = first.next_address()
    with reserve_network() as second:
        assert second.next_address() == address


def test_each_pod_gets_its_own_loopback_address(network: LoopbackNetwork) -> None:
    addresses = [network.next_address() for _ in range(3)]

    assert len(set(addresses)) == 3
    assert all(address.startswith("127.") for address in addresses)


def test_a_taken_port_is_named_with_what_to_do(network: LoopbackNetwork) -> None:
    address = network.next_address()
    message = rf"{address}:8000 is in use .* llama-engine-0 .* choose another"
    with socket.create_server((address, 8000)), pytest.raises(AddressInUseError, match=message):
        require_free(address, 8000, "llama-engine-0", "choose another")
    require_free(address, 8000, "llama-engine-0", "choose another")


def test_a_free_port_can_be_listened_on(network: LoopbackNetwork) -> None:
    address = network.next_address()
    socket.create_server((address, free_port(address))).close()


def test_the_kernel_gives_a_free_port_to_nobody_else(network: LoopbackNetwork) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    chosen = {free_port(network.next_address()) for _ in range(20)}
    assert all(10_000 <= port <= 65_535 and not first <= port <= last for port in chosen)
    assert len(chosen) > 15


def test_another_port_is_free_where_the_kernel_may_give_any(network, tmp_path):
    everything = tmp_path / "range"
    everything.write_text("1024\t65535\n")
    address = network.next_address()
    socket.create_server((address, free_port(address, everything))).close()


def test_taken_ports_are_passed_over(network, tmp_path):
    """The kernel gives all but two, of which one is taken."""
    address = network.next_address()
    two = tmp_path / "range"
    two.write_text("10002\t65535\n")
    with socket.create_server((address, 10_000)):
        assert {free_port(address, two) for _ in range(8)} == {10_001}
    assert {free_port(address, two) for _ in range(40)} == {10_000, 10_001}


def test_a_pod_evades_a_program_that_listens_on_every_address(network: LoopbackNetwork) -> None:
    address = network.next_address()
    with socket.create_server((address, 0)) as other:  # on the pod's address alone, as seen from the pod the same
        taken = other.getsockname()[1]
        assert usable_port(address, taken) not in (taken, 0)
    assert usable_port(address, taken) == taken
