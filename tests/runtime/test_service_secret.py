"""Keys follow from the secret alone, and tell nothing of it."""

from pathlib import Path

import pytest
import zmq

from kvasir_runtime.ranks.links import CoreLinks, RankLinks, network_addresses
from kvasir_runtime.service_secret import SECRET_VARIABLE, CurveKeys, curve_keys


def keys_of(secret: str) -> CurveKeys:
    keys = curve_keys({SECRET_VARIABLE: secret})
    assert keys is not None
    return keys


def test_processes_with_one_secret_have_one_pair_of_keys() -> None:
    assert keys_of("one") == keys_of("one")
    assert keys_of("one").private != keys_of("other").private


@pytest.mark.parametrize("environment", [{}, {SECRET_VARIABLE: ""}])
def test_without_a_secret_there_are_none(environment: dict[str, str]) -> None:
    assert curve_keys(environment) is None


def test_logs_show_neither_half() -> None:
    assert repr(keys_of("one")) == "CurveKeys()"


def test_zmq_takes_them(tmp_path: Path) -> None:
    """A wrong length would be refused by the library."""
    keys = keys_of("one")
    assert (len(keys.public), len(keys.private)) == (40, 40)
    assert zmq.curve_public(keys.private) == keys.public
    core = CoreLinks(network_addresses("127.0.0.1", 1), keys)
    RankLinks(core.bound, 0, keys).close()
    core.close()
