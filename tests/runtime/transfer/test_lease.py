"""Leases begin, are renewed, end and expire."""

from kvasir_runtime.transfer.offers import Leases


def test_expires_at_its_time_and_not_before() -> None:
    leases = Leases(10)
    leases.begin("a", now=0)
    assert leases.expired(9.9) == []
    assert leases.expired(10) == ["a"]
    assert leases.expired(20) == []


def test_renewal_begins_it_anew() -> None:
    leases = Leases(10)
    leases.begin("a", now=0)
    leases.renew("a", now=8)
    assert leases.expired(17.9) == []
    assert leases.next_deadline() == 18


def test_what_is_not_leased_is_not_renewed() -> None:
    leases = Leases(10)
    leases.renew("a", now=0)
    assert leases.next_deadline() is None


def test_an_ended_lease_does_not_expire() -> None:
    leases = Leases(10)
    leases.begin("a", now=0)
    leases.end("a")
    leases.end("b")
    assert leases.expired(100) == []
