"""Durations and quantities know their value, and quantities the API server's spelling."""

import pytest

from kvasir_operator.api.quantity import Duration, Quantity


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("0s", 0.0), ("300s", 300.0), ("10m", 600.0), ("1h30m", 5400.0)]
)
def test_a_duration_in_seconds(text: str, seconds: float) -> None:
    assert Duration(text).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "amount"), [("0", 0), ("500m", 0.5), ("1.5", 1.5), ("2k", 2000), ("64Gi", 64 * 2**30), ("1M", 1e6)]
)
def test_a_quantity_in_whole_units(text: str, amount: float) -> None:
    assert Quantity(text).amount == pytest.approx(amount)


CANONICAL = {
    "0": "0",
    "0Gi": "0",
    "1000m": "1",
    "0.5": "500m",
    "1500m": "1500m",
    "1000": "1k",
    "1024": "1024",
    "1024Mi": "1Gi",
    "1.5Gi": "1536Mi",
    "1Ki": "1Ki",
    "0.5Ki": "512",
    "1.5Ki": "1536",
    "1025Ki": "1025Ki",
    "2000M": "2G",
    "1024P": "1024P",
}
"""As the API server stores them (tests/controlplane/test_rollout.py asks it)."""


@pytest.mark.parametrize(
    ("text", "canonical"), [*CANONICAL.items(), ("007", "7"), ("0.0005", "0.0005"), ("1.0001Ki", "1.0001Ki")]
)
def test_an_amount_has_one_spelling_among_units_of_a_kind(text: str, canonical: str) -> None:
    assert Quantity(text).text == Quantity(canonical).text == canonical


@pytest.mark.parametrize("text", ["", "5", "-1s", "1 s", "1d", "s"])
def test_refuses_a_duration_without_a_unit_it_knows(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration(text)


@pytest.mark.parametrize("text", ["", "-1", "1GB", "one", "1e3"])
def test_refuses_a_quantity_that_kubernetes_users_do_not_write(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        Quantity(text)
